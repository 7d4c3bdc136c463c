/* Preloaded into a process that saves checkpoints: counts its write-side calls on paths with a given word in them, and
 * lets one of them fail, take half the bytes, or be the last thing the process does. Linux, glibc. Not for threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT, FAIL, SHORT, SHORT_THEN_FULL, KILL_BEFORE, KILL_AFTER };
enum { MOST = 4096 };

static char word[256];
static int armed, chosen, action, number, calls, full;
static char names[MOST][16];

void inject_arm(const char *path_word, int call, int what, int error) {
    snprintf(word, sizeof word, "%s", path_word);
    chosen = call, action = what, number = error, calls = 0, full = 0, armed = 1;
}

int inject_disarm(void) {
    armed = 0;
    return calls;
}

const char *inject_name(int call) { return names[call]; }

static int concerns(const char *path) { return armed && path && strstr(path, word); }

static int concerns_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return concerns(path);
}

/* Whether the call is to fail, with errno set. */
static int now(const char *name) {
    if (calls < MOST) snprintf(names[calls], sizeof names[0], "%s", name);
    if (calls++ != chosen) return 0;
    if (action == KILL_BEFORE) kill(getpid(), SIGKILL);
    errno = number;
    return action == FAIL;
}

static void done(void) {
    if (action == KILL_AFTER && calls == chosen + 1) kill(getpid(), SIGKILL);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define CALL(type, name, concern, parameters, ...) \
    type name parameters { \
        REAL(type, #name, __VA_ARGS__); \
        if (!(concern)) return real FORWARD; \
        if (now(#name)) return -1; \
        type result = real FORWARD; \
        done(); \
        return result; \
    }

#define FORWARD (from, to)
CALL(int, rename, concerns(to), (const char *from, const char *to), const char *, const char *)
#undef FORWARD
#define FORWARD (a, from, b, to)
CALL(int, renameat, concerns(to), (int a, const char *from, int b, const char *to), int, const char *, int, const char *)
#undef FORWARD
#define FORWARD (a, from, b, to, flags)
CALL(int, renameat2, concerns(to), (int a, const char *from, int b, const char *to, unsigned flags), int, const char *, int,
     const char *, unsigned)
#undef FORWARD
#define FORWARD (path, mode)
CALL(int, mkdir, concerns(path), (const char *path, mode_t mode), const char *, mode_t)
#undef FORWARD
#define FORWARD (fd, size)
CALL(int, ftruncate, concerns_fd(fd), (int fd, off_t size), int, off_t)
CALL(int, ftruncate64, concerns_fd(fd), (int fd, off_t size), int, off_t)
#undef FORWARD
#define FORWARD (fd, data, size, at)
CALL(ssize_t, pwrite, concerns_fd(fd), (int fd, const void *data, size_t size, off_t at), int, const void *, size_t, off_t)
CALL(ssize_t, pwrite64, concerns_fd(fd), (int fd, const void *data, size_t size, off_t at), int, const void *, size_t, off_t)
#undef FORWARD

/* Counted, not done: what is killed here is a process, and thousands of real ones take minutes on a busy disk. */
#define FLUSH(name) \
    int name(int fd) { \
        if (!concerns_fd(fd)) return 0; \
        if (now(#name)) return -1; \
        done(); \
        return 0; \
    }
FLUSH(fsync)
FLUSH(fdatasync)

int close(int fd) { /* where some file systems say what became of the data */
    REAL(int, "close", int);
    if (!concerns_fd(fd) || (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) return real(fd);
    int failed = now("close"), error = errno;
    int result = real(fd);
    if (failed) {
        errno = error;
        return -1;
    }
    done();
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (!concerns_fd(fd)) return real(fd, data, size);
    if (full) {
        errno = ENOSPC;
        return -1;
    }
    if (now("write")) return -1;
    int half = (action == SHORT || action == SHORT_THEN_FULL) && calls == chosen + 1 && size > 1;
    full = half && action == SHORT_THEN_FULL;
    ssize_t result = real(fd, data, half ? size / 2 : size);
    done();
    return result;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        if (!(flags & O_CREAT) || !concerns(path)) return real(path, flags, mode); \
        if (now("open")) return -1; \
        int result = real(path, flags, mode); \
        done(); \
        return result; \
    }
OPEN(open)
OPEN(open64)
