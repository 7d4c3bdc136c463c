/* Device and pinned memory: allocations kept by address, so that every access can be checked against them.
 *
 * Pages come from mmap and cost nothing until they are touched. Small allocations are filled with 0xff (NaN, -1): a
 * GPU's fresh memory is not zero either.
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

int memory_allocate(int device, size_t bytes, bool pinned, u64 *address) {
    if (!bytes) return CU_INVALID_VALUE;
    size_t whole = (bytes + 2 * PAGE - 1) / PAGE * PAGE + PAGE;
    pthread_rwlock_wrlock(&lock);
    if (!pinned && used[device] + bytes > settings.memory) {
        pthread_rwlock_unlock(&lock);
        return CU_OUT_OF_MEMORY;
    }
    int fd = pinned ? -1 : memfd_create("emulated", MFD_CLOEXEC); /* which other processes can map (ipc.c) */
    if (fd >= 0 && ftruncate(fd, (off_t)whole)) close(fd), fd = -1;
    void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE, fd, 0);
    if (p == MAP_FAILED) {
        pthread_rwlock_unlock(&lock);
        return CU_OUT_OF_MEMORY;
    }
    if (bytes <= FILL) memset(p, 0xff, bytes);
    insert((Allocation){(u64)p, bytes, pinned ? -1 : device, pinned, false, p, whole, fd});
    if (!pinned) used[device] += bytes;
    pthread_rwlock_unlock(&lock);
    *address = (u64)p;
    return CU_OK;
}

/* memory of the host that is registered as pinned, or a module's variables */
int memory_add(u64 address, size_t bytes, int device, bool pinned) {
    pthread_rwlock_wrlock(&lock);
    insert((Allocation){address, bytes, device, pinned, true, NULL, 0, -1});
    pthread_rwlock_unlock(&lock);
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
    if (a.base && a.fd >= 0) close(a.fd);
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
