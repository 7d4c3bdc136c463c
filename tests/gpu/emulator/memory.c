/* Device and pinned memory: allocations kept by address, so that every access can be checked against them.
 *
 * Pages come from mmap and cost nothing until they are touched. Small allocations are filled with 0xff (NaN, -1): a
 * GPU's fresh memory is not zero either.
 *
 * Memory of a device is a file, so that other processes can map it (ipc.c). One file per device, because a file for each
 * allocation would use up what a process may open. The file only grows; freed pages become holes in it.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulator.h"

static Allocation *list; /* sorted by address */
static int count, cap;
static struct { u64 address, size; } freed[256]; /* the last ones */
static unsigned nfreed;
static size_t used[MAX_DEVICES];
static struct { int fd; pid_t owner; u64 end; } files[MAX_DEVICES];
static bool peers[MAX_DEVICES][MAX_DEVICES];
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
u64 shared_window, local_window;

enum { PAGE = 4096 };
static const size_t FILL = 8u << 20;

__attribute__((constructor)) static void windows(void) {
    void *p = mmap(NULL, 3 * WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    shared_window = ((u64)p + WINDOW - 1) & ~(WINDOW - 1);
    local_window = shared_window + WINDOW;
}

static int lower(u64 address) { /* the last allocation that starts at or before the address, -1 if none */
    int lo = 0, hi = count;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (list[mid].address <= address) lo = mid + 1;
        else hi = mid;
    }
    return lo - 1;
}

static void insert(Allocation a) {
    if (count == cap) list = realloc(list, sizeof *list * (size_t)(cap = cap ? 2 * cap : 64));
    int at = lower(a.address) + 1;
    memmove(list + at + 1, list + at, sizeof *list * (size_t)(count - at));
    list[at] = a;
    count++;
}

/* 1 and the allocation that has the address, or 0 and (size > 0) the nearest one below it */
int memory_find(u64 address, Allocation *found) {
    pthread_rwlock_rdlock(&lock);
    int at = lower(address), ok = 0;
    *found = (Allocation){0};
    if (at >= 0) {
        *found = list[at];
        ok = address - list[at].address < list[at].size;
    }
    pthread_rwlock_unlock(&lock);
    return ok;
}

bool memory_was_freed(u64 address) {
    for (int i = 0; i < 256; i++)
        if (address - freed[i].address < freed[i].size) return true;
    return false;
}

/* More bytes of the device's file. False if there are none; private memory does then, which no other process can map. */
static bool extend(int device, size_t bytes, int *fd, u64 *offset) {
    if (files[device].owner != getpid()) { /* none so far, or that of the process that has forked this one */
        files[device].fd = memfd_create("odyssey-emulated-gpu", MFD_CLOEXEC);
        files[device].owner = getpid();
        files[device].end = 0;
    }
    if (files[device].fd < 0 || ftruncate(files[device].fd, (off_t)(files[device].end + bytes))) return false;
    *fd = files[device].fd;
    *offset = files[device].end;
    files[device].end += bytes;
    return true;
}

int memory_allocate(int device, size_t bytes, bool pinned, u64 *address) {
    if (!bytes) return CU_INVALID_VALUE;
    size_t whole = (bytes + 2 * PAGE - 1) / PAGE * PAGE + PAGE;
    pthread_rwlock_wrlock(&lock);
    if (!pinned && used[device] + bytes > settings.memory) {
        pthread_rwlock_unlock(&lock);
        return CU_OUT_OF_MEMORY;
    }
    int fd = -1;
    u64 offset = 0;
    int kind = !pinned && extend(device, whole, &fd, &offset) ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, fd, (off_t)offset);
    if (p == MAP_FAILED) {
        pthread_rwlock_unlock(&lock);
        return CU_OUT_OF_MEMORY;
    }
    if (bytes <= FILL) memset(p, 0xff, bytes);
    insert((Allocation){.address = (u64)p, .size = bytes, .device = pinned ? -1 : device, .pinned = pinned, .base = p, .base_size = whole, .fd = fd, .offset = offset});
    if (!pinned) used[device] += bytes;
    pthread_rwlock_unlock(&lock);
    *address = (u64)p;
    return CU_OK;
}

/* memory of the host that is registered as pinned, or a module's variables */
int memory_add(u64 address, size_t bytes, int device, bool pinned) {
    pthread_rwlock_wrlock(&lock);
    insert((Allocation){.address = address, .size = bytes, .device = device, .pinned = pinned, .managed = true, .fd = -1});
    pthread_rwlock_unlock(&lock);
    return CU_OK;
}

/* memory of another process, which has it in this file */
int memory_open(int fd, u64 offset, size_t bytes, size_t whole, int device, u64 *address) {
    void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset);
    if (p == MAP_FAILED) return CU_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&lock);
    insert((Allocation){.address = (u64)p, .size = bytes, .device = device, .managed = true, .opened = true, .base = p, .base_size = whole, .fd = -1});
    pthread_rwlock_unlock(&lock);
    *address = (u64)p;
    return CU_OK;
}

int memory_free(u64 address) {
    pthread_rwlock_wrlock(&lock);
    int at = lower(address);
    if (at < 0 || list[at].address != address) {
        pthread_rwlock_unlock(&lock);
        return CU_INVALID_VALUE;
    }
    Allocation a = list[at];
    memmove(list + at, list + at + 1, sizeof *list * (size_t)(count - at - 1));
    count--;
    freed[nfreed % 256].address = a.address, freed[nfreed % 256].size = a.size;
    nfreed++;
    if (!a.pinned && !a.managed) used[a.device] -= a.size;
    pthread_rwlock_unlock(&lock);
    if (a.base) munmap(a.base, a.base_size);
    if (a.fd >= 0 && files[a.device].fd == a.fd && files[a.device].owner == getpid()) /* a child must not clear its parent's memory */
        fallocate(a.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)a.offset, (off_t)a.base_size);
    return CU_OK;
}

size_t memory_used(int device) { return used[device]; }

bool memory_is_pinned(const void *p) {
    Allocation a;
    return memory_find((u64)p, &a) && a.pinned;
}

bool memory_peer(int from, int to) { return from == to || peers[from][to]; }
void memory_set_peer(int from, int to) { peers[from][to] = true; }

/* a copy or memset: all of it inside one allocation, where the address is a device's */
int memory_check_copy(u64 address, size_t bytes, const char *what) {
    Allocation a;
    if (!bytes) return CU_OK;
    int ok = memory_find(address, &a);
    if (ok && address + bytes <= a.address + a.size) return CU_OK;
    fprintf(stderr, "[emulated GPU] %s of %zu bytes at 0x%lx leaves device memory: ", what, bytes, (long)address);
    if (ok) fprintf(stderr, "the allocation there ends after %lu bytes\n", (long)(a.address + a.size - address));
    else fprintf(stderr, "nothing is allocated there\n");
    return CU_INVALID_VALUE;
}
