/* Memory of one process in another (cuIpc*), and queues that write a number and wait for one (cuStreamWriteValue32,
 * cuStreamWaitValue32). A handle names the file in which the process that made it has the memory (memory.c). As in CUDA a
 * handle is of a whole allocation, and the process that made it cannot open it.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "stream.h"

typedef struct Handle {
    u32 magic;
    s32 pid, fd;
    u64 file, offset, size, whole; /* file: its inode, since another process may have got the number pid by now */
    u8 unused[16];
} Handle;
_Static_assert(sizeof(Handle) == 64, "CUipcMemHandle");
enum { IPC = 0x1bc0ffee };

static u64 file_of(int fd) {
    struct stat s;
    return fstat(fd, &s) ? 0 : s.st_ino;
}

API int cuIpcGetMemHandle(Handle *h, u64 p) {
    Allocation a;
    if (!memory_find(p, &a) || a.fd < 0) return CU_INVALID_VALUE;
    *h = (Handle){.magic = IPC, .pid = getpid(), .fd = a.fd, .file = file_of(a.fd), .offset = a.offset, .size = a.size, .whole = a.base_size};
    return CU_OK;
}
API int cuIpcOpenMemHandle_v2(u64 *out, Handle h, unsigned flags) {
    char path[64];
    (void)flags;
    if (h.magic != IPC || h.pid == getpid()) return CU_INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return CU_INVALID_VALUE; /* the process has ended */
    int e = file_of(fd) == h.file ? memory_open(fd, h.offset, h.size, h.whole, current_device(), out) : CU_INVALID_VALUE;
    close(fd);
    return e;
}
API int cuIpcCloseMemHandle(u64 p) {
    Allocation a;
    if (!memory_find(p, &a) || !a.opened) return CU_INVALID_VALUE;
    stream_wait_all(current_device());
    return memory_free(p);
}

/* ---- numbers -------------------------------------------------------------------------------------------------------- */
static const u64 PATIENCE = 60000000000ull; /* ns; a real queue waits for ever */

static int run_write(Op *o) {
    __atomic_store_n((u32 *)o->dst, (u32)o->value, __ATOMIC_RELEASE);
    return CU_OK;
}
static int run_wait_value(Op *o) {
    u64 begun = now_ns();
    for (;;) {
        u32 is = __atomic_load_n((u32 *)o->dst, __ATOMIC_ACQUIRE);
        if ((s32)(is - (u32)o->value) >= 0) return CU_OK; /* as CU_STREAM_WAIT_VALUE_GEQ compares */
        if (now_ns() - begun > PATIENCE) {
            fprintf(stderr, "[emulated GPU] a queue has waited a minute for %u or more at 0x%lx, where %u is; look at the process that must write it\n",
                    (u32)o->value, (long)o->dst, is);
            return CU_ILLEGAL_ADDRESS;
        }
        usleep(20);
    }
}
static int number(void *h, u64 at, u32 value, int (*run)(Op *)) {
    int e = memory_check_copy(at, 4, "a number of a queue");
    if (e || at % 4) return CU_INVALID_VALUE;
    Op *o = op_new(run);
    o->dst = at, o->value = value;
    return stream_add(stream_of(h), o);
}
API int cuStreamWriteValue32_v2(void *h, u64 at, u32 value, unsigned flags) {
    (void)flags; /* memory is in order here with or without CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER */
    return number(h, at, value, run_write);
}
API int cuStreamWaitValue32_v2(void *h, u64 at, u32 value, unsigned flags) { /* flags 0: until the number is at least `value` */
    return flags ? CU_NOT_SUPPORTED : number(h, at, value, run_wait_value);
}
