/* An emulated libnccl.so.2 for tests: ranks are connected by Unix sockets, operations run in streams of the emulated GPU.
 *
 * It has the functions of NCCL that odyssey calls, with NCCL's types and results, and only what can be told apart by a
 * caller: order of operations, groups, streams, errors that are reported later, aborts. Device memory is memory of the
 * process here. What it is not: fast, or a way to use a real GPU.
 *
 * ODYSSEY_EMULATED_NCCL_VERSION: what ncclGetVersion says (22105).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, TYPES };
enum Kind { SEND = 1, RECV };
static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct { char bytes[128]; } ncclUniqueId;
typedef struct Comm {
    int rank, size, device, *sockets;
    atomic_int error, stop, running;
} Comm;

typedef struct Task {
    enum Kind kind;
    const char *send;
    char *recv;
    size_t count;
    int type, peer;
    Comm *comm;
    void *stream;
    struct Task *next;
} Task;

static char last_error[512];
static __thread int depth;
static __thread Task *first, **end;

static int fail(int result, const char *format, ...) {
    va_list a;
    va_start(a, format);
    vsnprintf(last_error, sizeof last_error, format, a);
    va_end(a);
    return result;
}

/* --- the driver: the same library that the process has loaded --- */

static void *driver(const char *name) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    void *f = library ? dlsym(library, name) : NULL;
    if (!f) {
        fprintf(stderr, "[emulated NCCL] libcuda.so.1 has no %s\n", name);
        abort();
    }
    return f;
}

/* --- connections --- */

static bool all_of(int fd, void *data, size_t n, bool out) {
    char *p = data;
    while (n) {
        ssize_t k = out ? send(fd, p, n, MSG_NOSIGNAL) : recv(fd, p, n, 0);
        if (k <= 0) {
            if (k < 0 && errno == EINTR) continue;
            return false;
        }
        p += k, n -= (size_t)k;
    }
    return true;
}

static socklen_t address_of(struct sockaddr_un *a, const char *id, int rank) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX; /* an abstract name: no file is left behind by a rank that is killed */
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "%.80s-%d", id, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

API int ncclGetVersion(int *version) {
    const char *text = getenv("ODYSSEY_EMULATED_NCCL_VERSION");
    *version = text ? atoi(text) : 22105;
    return SUCCESS;
}

API int ncclGetUniqueId(ncclUniqueId *id) {
    static atomic_int made;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "odyssey-nccl-%d-%lx-%lx-%d", getpid(), (long)now.tv_sec, now.tv_nsec, ++made);
    return SUCCESS;
}

static int connect_all(Comm *c, const char *id) {
    struct sockaddr_un a;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), devices[c->size];
    socklen_t n = address_of(&a, id, c->rank);
    if (listener < 0 || bind(listener, (struct sockaddr *)&a, n) || listen(listener, c->size))
        return fail(SYSTEM, "rank %d cannot listen: %s", c->rank, strerror(errno));
    devices[c->rank] = c->device;
    for (int p = 0; p < c->size; p++) {
        int fd = -1, mine[2] = {c->rank, c->device}, theirs[2];
        if (p == c->rank) continue;
        if (p < c->rank) {
            n = address_of(&a, id, p);
            for (int tries = 0; tries < 60000; tries++, usleep(1000)) {
                fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
                if (!connect(fd, (struct sockaddr *)&a, n)) break;
                close(fd);
                fd = -1;
            }
        } else {
            fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        }
        if (fd < 0 || !all_of(fd, mine, sizeof mine, true) || !all_of(fd, theirs, sizeof theirs, false))
            return fail(SYSTEM, "rank %d does not meet the others: %s", c->rank, strerror(errno));
        c->sockets[theirs[0]] = fd;
        devices[theirs[0]] = theirs[1];
    }
    close(listener);
    for (int p = 0; p < c->size; p++)
        for (int q = 0; q < p; q++)
            if (devices[p] == devices[q])
                return fail(INVALID_USAGE, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", q, p,
                            devices[p]);
    for (int p = 0; p < c->size; p++)
        if (p != c->rank) fcntl(c->sockets[p], F_SETFL, fcntl(c->sockets[p], F_GETFL) | O_NONBLOCK);
    return SUCCESS;
}

API int ncclCommInitRank(Comm **out, int size, ncclUniqueId id, int rank) {
    if (size < 1 || rank < 0 || rank >= size) return fail(INVALID_ARGUMENT, "Invalid rank requested : %d/%d", rank, size);
    Comm *c = calloc(1, sizeof *c);
    int (*get_device)(int *) = driver("cuCtxGetDevice");
    c->rank = rank, c->size = size, c->sockets = malloc(sizeof(int) * (size_t)size);
    memset(c->sockets, 0xff, sizeof(int) * (size_t)size);
    if (get_device(&c->device)) return fail(UNHANDLED_CUDA, "Cuda failure 'no current device'");
    int result = connect_all(c, id.bytes);
    if (result) return result;
    *out = c;
    return SUCCESS;
}

static int end_comm(Comm *c) {
    if (!c) return SUCCESS;
    for (int i = 0; i < 5000 && c->running; i++) usleep(1000);
    for (int p = 0; p < c->size; p++)
        if (c->sockets[p] >= 0) close(c->sockets[p]);
    if (c->running) return SUCCESS; /* somebody still looks at it */
    free(c->sockets);
    free(c);
    return SUCCESS;
}
API int ncclCommDestroy(Comm *c) { return end_comm(c); }
API int ncclCommAbort(Comm *c) {
    if (c) c->stop = 1;
    return end_comm(c);
}
API int ncclCommGetAsyncError(Comm *c, int *result) {
    *result = c->error;
    return SUCCESS;
}
API const char *ncclGetLastError(Comm *c) {
    (void)c;
    return last_error;
}
API const char *ncclGetErrorString(int result) {
    static const char *words[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)", "internal error - please report this issue",
        "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error"};
    return result < 0 || result > REMOTE ? "unknown result code" : words[result];
}

/* --- transfers: what a group of tasks gives to and takes from each rank, in order, with a head that is compared --- */

typedef struct { uint64_t kind, bytes; } Head;
typedef struct Piece {
    Head head, came;
    char *data;
    size_t done; /* of head and data */
    struct Piece *next;
} Piece;
typedef struct { Piece *first, *last; } Line;

static void add(Line *line, enum Kind kind, const char *data, size_t bytes) {
    Piece *p = calloc(1, sizeof *p);
    p->head = (Head){kind == RECV ? SEND : kind, bytes}, p->data = (char *)data;
    if (line->last) line->last->next = p;
    else line->first = p;
    line->last = p;
}

/* moves a line on as far as it goes; -1: the other side is gone, -2: it sends something else */
static int move(Line *line, int fd, bool out) {
    for (Piece *p; (p = line->first);) {
        size_t head = sizeof(Head), whole = head + p->head.bytes;
        if (p->done < whole) {
            bool in_head = p->done < head;
            char *at = in_head ? (char *)(out ? &p->head : &p->came) + p->done : p->data + (p->done - head);
            size_t n = in_head ? head - p->done : whole - p->done;
            ssize_t k = out ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
            if (k < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
            if (k <= 0) return -1;
            p->done += (size_t)k;
        }
        if (!out && p->done == head && memcmp(&p->head, &p->came, head)) return -2;
        if (p->done == whole) {
            line->first = p->next;
            if (!line->first) line->last = NULL;
            free(p);
        }
    }
    return 0;
}

static void prepare(Task *t, Line *out, Line *in, Line *own_out, Line *own_in) {
    Comm *c = t->comm;
    size_t n = t->count * sizes[t->type];
    if (t->kind == SEND) add(t->peer == c->rank ? own_out : out + t->peer, SEND, t->send, n);
    if (t->kind == RECV) add(t->peer == c->rank ? own_in : in + t->peer, RECV, t->recv, n);
}

static void clear(Line *line) {
    for (Piece *p; (p = line->first); line->first = p->next, free(p)) {}
}

/* a group of tasks of one communicator, in its stream */
static void run(void *list) {
    Task *tasks = list;
    Comm *c = tasks->comm;
    Line out[c->size], in[c->size], own_out = {0}, own_in = {0};
    struct pollfd fds[c->size];
    memset(out, 0, sizeof out), memset(in, 0, sizeof in);
    for (Task *t = tasks; t; t = t->next) prepare(t, out, in, &own_out, &own_in);
    for (Piece *a = own_out.first, *b = own_in.first; a && b; a = a->next, b = b->next)
        memcpy(b->data, a->data, b->head.bytes < a->head.bytes ? b->head.bytes : a->head.bytes);
    for (bool busy = true; busy && !c->error && !c->stop;) {
        int k = 0;
        busy = false;
        for (int p = 0; p < c->size && !c->error; p++) {
            if (p == c->rank || (!out[p].first && !in[p].first)) continue;
            int r = move(out + p, c->sockets[p], true);
            if (!r) r = move(in + p, c->sockets[p], false);
            if (r) c->error = r == -1 ? fail(REMOTE, "NET/Socket : Connection closed by remote peer %d", p)
                                      : fail(INVALID_USAGE, "rank %d does something else than rank %d", p, c->rank);
            if (!out[p].first && !in[p].first) continue;
            busy = true;
            fds[k++] = (struct pollfd){c->sockets[p], (in[p].first ? POLLIN : 0) | (out[p].first ? POLLOUT : 0), 0};
        }
        if (busy && !c->error) poll(fds, (nfds_t)k, 20);
    }
    for (int p = 0; p < c->size; p++) clear(out + p), clear(in + p);
    clear(&own_out), clear(&own_in);
    for (Task *t = tasks, *next; t; t = next) {
        next = t->next;
        free(t);
    }
    c->running--;
}

/* --- calls --- */

static int launch(Task *tasks) {
    int (*host)(void *, void (*)(void *), void *) = driver("cuLaunchHostFunc");
    while (tasks) { /* those of the first one's communicator and stream, in order */
        Task *mine = NULL, **at = &mine, *rest = NULL, **after = &rest;
        Comm *c = tasks->comm;
        void *stream = tasks->stream;
        for (Task *t = tasks, *next; t; t = next) {
            next = t->next, t->next = NULL;
            if (t->comm == c && t->stream == stream) *at = t, at = &t->next;
            else *after = t, after = &t->next;
        }
        c->running++;
        if (host(stream, run, mine)) {
            c->running--;
            return fail(UNHANDLED_CUDA, "Cuda failure in cuLaunchHostFunc");
        }
        tasks = rest;
    }
    return SUCCESS;
}

API int ncclGroupStart(void) {
    if (!depth++) first = NULL, end = &first;
    return SUCCESS;
}
API int ncclGroupEnd(void) {
    if (!depth) return fail(INVALID_USAGE, "ncclGroupEnd: not in a group call.");
    if (--depth) return SUCCESS;
    Task *tasks = first;
    first = NULL;
    return launch(tasks);
}

static int call(enum Kind kind, const void *send, void *recv, size_t count, int type, int peer, Comm *c, void *s) {
    if (!c) return fail(INVALID_ARGUMENT, "comm argument is NULL");
    if (c->error) return fail(c->error, "an earlier operation has failed");
    if (type < 0 || type >= TYPES) return fail(INVALID_ARGUMENT, "invalid type %d", type);
    if (peer < 0 || peer >= c->size) return fail(INVALID_ARGUMENT, "invalid peer %d (nranks=%d)", peer, c->size);
    Task *t = calloc(1, sizeof *t);
    *t = (Task){kind, send, recv, count, type, peer, c, s, NULL};
    if (!depth) return launch(t);
    *end = t, end = &t->next;
    return SUCCESS;
}

API int ncclSend(const void *x, size_t n, int type, int peer, Comm *c, void *s) {
    return call(SEND, x, NULL, n, type, peer, c, s);
}
API int ncclRecv(void *y, size_t n, int type, int peer, Comm *c, void *s) {
    return call(RECV, NULL, y, n, type, peer, c, s);
}
