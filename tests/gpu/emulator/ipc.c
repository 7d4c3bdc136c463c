/* Memory of one process in another (cuIpc*), and queues that write and wait for numbers (cuStreamWriteValue32 and
 * cuStreamWaitValue32): device memory is a file that other processes can map. As in CUDA a handle is of a whole allocation and
 * cannot be opened where it was made.
 */
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stream.h"

typedef struct Handle { u32 magic; s32 pid, fd; u64 size, whole; u8 rest[32]; } Handle; /* 64 bytes */
_Static_assert(sizeof(Handle) == 64, "CUipcMemHandle");
enum { IPC = 0x1bc0ffee };

API int cuIpcGetMemHandle(Handle *h, u64 p) {
    Allocation a;
    if (!memory_find(p, &a) || a.fd < 0) return CU_INVALID_VALUE;
    *h = (Handle){.magic = IPC, .pid = getpid(), .fd = a.fd, .size = a.size, .whole = a.base_size};
    return CU_OK;
}
API int cuIpcOpenMemHandle_v2(u64 *out, Handle h, unsigned flags) {
    char path[64];
    (void)flags;
    if (h.magic != IPC || h.pid == getpid()) return CU_INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return CU_INVALID_VALUE;
    void *p = mmap(NULL, h.whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (p == MAP_FAILED) return CU_OUT_OF_MEMORY;
    *out = (u64)p;
    return memory_add((u64)p, h.size, current_device(), false);
}
API int cuIpcCloseMemHandle(u64 p) {
    Allocation a;
    if (!memory_find(p, &a)) return CU_INVALID_VALUE;
    memory_free(p);
    return munmap((void *)p, a.size) ? CU_INVALID_VALUE : CU_OK;
}

static int run_write(Op *o) {
    __atomic_store_n((u32 *)o->dst, (u32)o->value, __ATOMIC_RELEASE);
    return CU_OK;
}
static int run_wait_value(Op *o) {
    u64 begun = now_ns();
    while ((s32)(__atomic_load_n((u32 *)o->dst, __ATOMIC_ACQUIRE) - (u32)o->value) < 0) {
        if (now_ns() - begun > 60000000000ull) {
            fprintf(stderr, "[emulated GPU] a queue has waited a minute for a number at 0x%lx: it is %u, and %u is wanted\n", (long)o->dst,
                    *(u32 *)o->dst, (u32)o->value);
            return CU_ILLEGAL_ADDRESS;
        }
        usleep(20);
    }
    return CU_OK;
}
static int number(void *h, u64 at, u32 value, int (*run)(Op *)) {
    int e = memory_check_copy(at, 4, "a number of a queue");
    if (e || at & 3) return CU_INVALID_VALUE;
    Op *o = op_new(run);
    o->dst = at, o->value = value;
    return stream_add(stream_of(h), o);
}
API int cuStreamWriteValue32_v2(void *h, u64 at, u32 value, unsigned flags) {
    (void)flags;
    return number(h, at, value, run_write);
}
API int cuStreamWaitValue32_v2(void *h, u64 at, u32 value, unsigned flags) { /* flags 0: at least */
    return flags ? CU_NOT_SUPPORTED : number(h, at, value, run_wait_value);
}
