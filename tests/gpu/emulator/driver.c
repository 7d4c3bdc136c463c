/* The emulated CUDA driver: devices, contexts, memory, modules and launches. What MAX's run time calls is here; any
 * other function of its list answers CUDA_ERROR_NOT_SUPPORTED (see missing.c).
 */
#include <sched.h>
#include <unistd.h>

#include "stream.h"

Settings settings;
Counts counts;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int current = 0;
static Func *all_funcs[4096];
static int nfuncs;
static pthread_mutex_t module_lock = PTHREAD_MUTEX_INITIALIZER;

static u64 env_number(const char *name, u64 fallback) {
    const char *s = getenv(name);
    if (!s || !*s) return fallback;
    char *end;
    double x = strtod(s, &end);
    u64 unit = *end == 'K' || *end == 'k' ? 1ull << 10 : *end == 'M' || *end == 'm' ? 1ull << 20 : *end == 'G' || *end == 'g' ? 1ull << 30 : 1;
    return (u64)(x * (double)unit);
}
static void read_settings(void) {
    settings.devices = (int)env_number("ODYSSEY_EMULATED_GPUS", 1);
    if (settings.devices > MAX_DEVICES) settings.devices = MAX_DEVICES;
    settings.memory = env_number("ODYSSEY_EMULATED_MEMORY", 1ull << 30);
    settings.cc = (int)env_number("ODYSSEY_EMULATED_CC", 90);
    settings.late = (int)env_number("ODYSSEY_EMULATOR_LATE", 0);
    if (settings.late == 1) settings.late = 20;
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    settings.threads = (int)env_number("ODYSSEY_EMULATOR_THREADS", cpus < 2 ? 1 : 2);
    settings.verbose = env_number("ODYSSEY_EMULATOR_VERBOSE", 0) != 0;
    const char *order = getenv("ODYSSEY_EMULATOR_ORDER");
    settings.shuffle = order && *order;
    settings.seed = settings.shuffle ? env_number("ODYSSEY_EMULATOR_ORDER", 0) : 0;
    settings.stats_file = getenv("ODYSSEY_EMULATOR_STATS");
    settings.stats = settings.stats_file && *settings.stats_file;
}
void settings_read(void) { pthread_once(&once, read_settings); }
int current_device(void) { return current; }

API int cuInit(unsigned flags) {
    (void)flags;
    settings_read();
    return CU_OK;
}
API int cuDriverGetVersion(int *v) {
    *v = 13000;
    return CU_OK;
}
API int cuDeviceGetCount(int *n) {
    settings_read();
    *n = settings.devices;
    return CU_OK;
}
API int cuDeviceGet(int *d, int i) {
    settings_read();
    if (i < 0 || i >= settings.devices) return CU_INVALID_DEVICE;
    *d = i;
    return CU_OK;
}
API int cuDeviceGetName(char *s, int n, int d) {
    (void)d;
    snprintf(s, (size_t)n, "Emulated GPU");
    return CU_OK;
}
API int cuDeviceTotalMem_v2(size_t *n, int d) {
    (void)d;
    *n = settings.memory;
    return CU_OK;
}
API int cuDeviceGetUuid(u8 *u, int d) {
    memset(u, 0, 16);
    u[0] = 0xe0, u[15] = (u8)d;
    return CU_OK;
}
API int cuDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
    case 1: *v = 1024; break;    /* threads per block */
    case 2: case 3: *v = 1024; break;
    case 4: *v = 64; break;
    case 5: *v = 0x7fffffff; break; /* grid */
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;   /* shared memory per block */
    case 9: *v = 65536; break;   /* constant memory */
    case 10: *v = 32; break;     /* warp */
    case 11: *v = 0x7fffffff; break;
    case 12: *v = 65536; break;  /* registers per block */
    case 13: *v = 1980000; break; /* kHz */
    case 14: *v = 512; break;
    case 15: case 31: *v = 1; break;
    case 16: *v = 132; break;    /* multiprocessors */
    case 19: *v = 1; break;      /* maps host memory */
    case 33: *v = d + 1; break;  /* PCI bus */
    case 36: *v = 3201000; break;
    case 37: *v = 6144; break;
    case 38: *v = 50 << 20; break; /* L2 */
    case 39: *v = 2048; break;   /* threads per multiprocessor */
    case 40: *v = 3; break;
    case 41: *v = 1; break;      /* unified addressing */
    case 75: *v = settings.cc / 10; break;
    case 76: *v = settings.cc % 10; break;
    case 78: *v = 1; break;      /* stream priorities */
    case 81: *v = settings.cc >= 90 ? 233472 : 167936; break; /* shared memory per multiprocessor */
    case 82: *v = 65536; break;
    case 97: *v = settings.cc >= 90 ? 232448 : 166912; break; /* opt-in shared memory per block */
    case 106: *v = 32; break;
    case 111: *v = 1024; break;
    default: *v = 0;
    }
    return CU_OK;
}
API int cuDeviceCanAccessPeer(int *can, int a, int b) {
    *can = a != b;
    return CU_OK;
}
API int cuDeviceGetP2PAttribute(int *v, int attribute, int a, int b) {
    *v = attribute == 2 ? 1 : a != b; /* native atomics, access */
    return CU_OK;
}
/* The device's pool of asynchronous allocations, which nothing here allocates from: access to it is access to nothing. */
API int cuDeviceGetMemPool(void **pool, int d) {
    *pool = (void *)(u64)(0x2000 + d);
    return CU_OK;
}
API int cuMemPoolSetAccess(void *pool, const void *access, size_t n) {
    (void)pool, (void)access, (void)n;
    return CU_OK;
}
API int cuDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, (size_t)n, "00000000:%02x:00.0", d + 1);
    return CU_OK;
}

/* a context is its device's number + 1, as an address */
API int cuDevicePrimaryCtxRetain(void **c, int d) {
    *c = (void *)(0x1000l + d);
    return CU_OK;
}
API int cuDevicePrimaryCtxRelease_v2(int d) {
    (void)d;
    return CU_OK;
}
/* forgets an error; memory stays */
API int cuDevicePrimaryCtxReset_v2(int d) {
    stream_wait_all(d);
    device_fail(d, CU_OK);
    return CU_OK;
}
static _Thread_local void *stack[64];
static _Thread_local int depth;
static void enter(void *c) {
    if (c) current = (int)((u64)c - 0x1000);
}
API int cuCtxCreate_v2(void **c, unsigned flags, int d) {
    (void)flags;
    *c = (void *)(0x1000l + d);
    if (depth < 64) stack[depth++] = *c;
    enter(*c);
    return CU_OK;
}
API int cuCtxDestroy(void *c) {
    (void)c;
    return CU_OK;
}
API int cuCtxSetCurrent(void *c) {
    if (!depth) depth = 1;
    stack[depth - 1] = c;
    enter(c);
    return CU_OK;
}
API int cuCtxGetCurrent(void **c) {
    *c = depth ? stack[depth - 1] : NULL;
    return CU_OK;
}
API int cuCtxPushCurrent_v2(void *c) {
    if (depth < 64) stack[depth++] = c;
    enter(c);
    return CU_OK;
}
API int cuCtxPushCurrent(void *c) { return cuCtxPushCurrent_v2(c); }
API int cuCtxPopCurrent_v2(void **c) {
    if (c) *c = depth ? stack[depth - 1] : NULL;
    if (depth) depth--;
    if (depth) enter(stack[depth - 1]);
    return CU_OK;
}
API int cuCtxPopCurrent(void **c) { return cuCtxPopCurrent_v2(c); }
API int cuCtxGetDevice(int *d) {
    *d = current;
    return CU_OK;
}
API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return CU_OK;
}
API int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    (void)flags;
    int to = (int)((u64)peer - 0x1000);
    if (to < 0 || to >= settings.devices) return CU_INVALID_DEVICE;
    if (memory_peer(current, to)) return CU_PEER_ALREADY;
    memory_set_peer(current, to);
    return CU_OK;
}

/* ---- memory -------------------------------------------------------------------------------------------------------- */
API int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *total = settings.memory;
    *available = settings.memory - memory_used(current);
    return CU_OK;
}
API int cuMemAlloc_v2(u64 *p, size_t n) {
    if (settings.verbose) fprintf(stderr, "[emulated GPU] device %d allocates %zu bytes\n", current, n);
    int e = graph_forbids();
    counts.allocations++;
    return e ? e : memory_allocate(current, n, false, p);
}
API int cuMemAllocAsync(u64 *p, size_t n, void *s) {
    (void)s;
    return cuMemAlloc_v2(p, n);
}
API int cuMemFree_v2(u64 p) {
    if (!p) return CU_OK;
    counts.frees++;
    stream_wait_all(current);
    Allocation a;
    if (memory_find(p, &a) && a.opened) return CU_INVALID_VALUE; /* cuIpcCloseMemHandle does that */
    return memory_free(p);
}
static int run_free(Op *o) { return memory_free(o->dst); }
API int cuMemFreeAsync(u64 p, void *h) {
    if (!p) return CU_OK;
    counts.frees++;
    Op *o = op_new(run_free);
    o->dst = p;
    return stream_add(stream_of(h), o);
}
API int cuMemHostAlloc(void **p, size_t n, unsigned flags) {
    (void)flags;
    counts.allocations++;
    return memory_allocate(current, n ? n : 1, true, (u64 *)p);
}
API int cuMemAllocHost_v2(void **p, size_t n) { return cuMemHostAlloc(p, n, 0); }
API int cuMemFreeHost(void *p) {
    counts.frees++;
    for (int d = 0; d < settings.devices; d++) stream_wait_all(d);
    return memory_free((u64)p);
}
API int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    (void)flags;
    return memory_add((u64)p, n, -1, true);
}
API int cuMemHostUnregister(void *p) { return memory_free((u64)p); }
API int cuMemHostGetDevicePointer_v2(u64 *d, void *p, unsigned flags) {
    (void)flags;
    *d = (u64)p;
    return CU_OK;
}
API int cuMemGetAddressRange_v2(u64 *base, size_t *size, u64 p) {
    Allocation a;
    if (!memory_find(p, &a)) return CU_INVALID_VALUE;
    if (base) *base = a.address;
    if (size) *size = a.size;
    return CU_OK;
}
API int cuPointerGetAttribute(void *out, int attribute, u64 p) {
    Allocation a;
    if (!memory_find(p, &a)) return CU_INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)out = (void *)(0x1000l + (a.device < 0 ? 0 : a.device)); return CU_OK;
    case 2: *(u32 *)out = a.pinned ? 1 : 2; return CU_OK;
    case 3: *(u64 *)out = p; return CU_OK;
    case 4: *(void **)out = (void *)p; return CU_OK;
    case 8: *(u32 *)out = 0; return CU_OK;
    case 9: *(int *)out = a.device < 0 ? 0 : a.device; return CU_OK;
    default: return CU_NOT_SUPPORTED;
    }
}
API int cuPointerGetAttributes(unsigned n, int *which, void **out, u64 p) {
    for (unsigned i = 0; i < n; i++) {
        int e = cuPointerGetAttribute(out[i], which[i], p);
        if (e) return e;
    }
    return CU_OK;
}

static int run_copy(Op *o) {
    memmove((void *)o->dst, o->staged ? o->staged : (void *)o->src, o->n);
    return CU_OK;
}
enum { TO_DEVICE = 1, FROM_DEVICE = 2 };
static int copy(u64 dst, u64 src, size_t n, void *h, int kind, bool wait) {
    Stream *s = stream_of(h);
    int e = device_error(s->device);
    if (e || !n) return e;
    if ((kind & TO_DEVICE) && (e = memory_check_copy(dst, n, "a copy to the device"))) return e;
    if ((kind & FROM_DEVICE) && (e = memory_check_copy(src, n, "a copy from the device"))) return e;
    Op *o = op_new(run_copy);
    o->dst = dst, o->src = src, o->n = n;
    if (settings.late && kind == TO_DEVICE && !memory_is_pinned((void *)src)) { /* pageable memory is read before the call returns */
        o->staged = malloc(n);
        memcpy(o->staged, (void *)src, n);
    }
    if (kind == FROM_DEVICE && !memory_is_pinned((void *)dst)) wait = true;
    *(kind == TO_DEVICE ? &counts.up : kind == FROM_DEVICE ? &counts.down : &counts.within) += 1;
    counts.waits += wait;
    u64 seq = 0;
    e = stream_add_get(s, o, &seq);
    return e ? e : wait ? stream_wait(s, seq) : CU_OK;
}
API int cuMemcpyHtoDAsync_v2(u64 d, void *s, size_t n, void *h) { return copy(d, (u64)s, n, h, TO_DEVICE, false); }
API int cuMemcpyDtoHAsync_v2(void *d, u64 s, size_t n, void *h) { return copy((u64)d, s, n, h, FROM_DEVICE, false); }
API int cuMemcpyDtoDAsync_v2(u64 d, u64 s, size_t n, void *h) { return copy(d, s, n, h, TO_DEVICE | FROM_DEVICE, false); }
API int cuMemcpyHtoD_v2(u64 d, void *s, size_t n) { return copy(d, (u64)s, n, NULL, TO_DEVICE, true); }
API int cuMemcpyDtoH_v2(void *d, u64 s, size_t n) { return copy((u64)d, s, n, NULL, FROM_DEVICE, true); }
API int cuMemcpyDtoD_v2(u64 d, u64 s, size_t n) { return copy(d, s, n, NULL, TO_DEVICE | FROM_DEVICE, true); }
API int cuMemcpyDtoD(u64 d, u64 s, size_t n) { return cuMemcpyDtoD_v2(d, s, n); }
API int cuMemcpyPeerAsync(u64 d, void *dc, u64 s, void *sc, size_t n, void *h) {
    (void)dc, (void)sc;
    return copy(d, s, n, h, TO_DEVICE | FROM_DEVICE, false);
}
API int cuMemcpyPeer(u64 d, void *dc, u64 s, void *sc, size_t n) {
    (void)dc, (void)sc;
    return copy(d, s, n, NULL, TO_DEVICE | FROM_DEVICE, true);
}
API int cuMemcpyAsync(u64 d, u64 s, size_t n, void *h) {
    Allocation a;
    int kind = (memory_find(d, &a) && !a.pinned ? TO_DEVICE : 0) | (memory_find(s, &a) && !a.pinned ? FROM_DEVICE : 0);
    return copy(d, s, n, h, kind, false);
}

static int run_set(Op *o) {
    u64 bytes = (u64)(size_t)o->user;
    for (u64 r = 0; r < o->src; r++) {
        char *p = (char *)o->dst + r * o->width;
        if (bytes == 1) memset(p, (int)o->value, o->n);
        else if (bytes == 2) for (u64 i = 0; i < o->n; i++) ((u16 *)p)[i] = (u16)o->value;
        else for (u64 i = 0; i < o->n; i++) ((u32 *)p)[i] = (u32)o->value;
    }
    return CU_OK;
}
static int set(u64 d, u32 v, size_t n, int bytes, void *h, u64 rows, u64 pitch) {
    int e = memory_check_copy(d, rows > 1 ? (rows - 1) * pitch + n * (size_t)bytes : n * (size_t)bytes, "a memset");
    if (e || !n) return e;
    counts.sets++;
    Op *o = op_new(run_set);
    o->dst = d, o->value = v, o->n = n, o->src = rows, o->width = pitch, o->user = (void *)(size_t)bytes;
    return stream_add(stream_of(h), o);
}
API int cuMemsetD8Async(u64 d, u8 v, size_t n, void *h) { return set(d, v, n, 1, h, 1, 0); }
API int cuMemsetD16Async(u64 d, u16 v, size_t n, void *h) { return set(d, v, n, 2, h, 1, 0); }
API int cuMemsetD32Async(u64 d, u32 v, size_t n, void *h) { return set(d, v, n, 4, h, 1, 0); }
API int cuMemsetD8_v2(u64 d, u8 v, size_t n) { return set(d, v, n, 1, NULL, 1, 0); }
API int cuMemsetD16_v2(u64 d, u16 v, size_t n) { return set(d, v, n, 2, NULL, 1, 0); }
API int cuMemsetD32_v2(u64 d, u32 v, size_t n) { return set(d, v, n, 4, NULL, 1, 0); }
API int cuMemsetD2D32Async(u64 d, size_t pitch, u32 v, size_t w, size_t rows, void *h) { return set(d, v, w, 4, h, rows, pitch); }
API int cuMemsetD2D32_v2(u64 d, size_t pitch, u32 v, size_t w, size_t rows) { return set(d, v, w, 4, NULL, rows, pitch); }

/* ---- modules and launches -------------------------------------------------------------------------------------------- */
API int cuModuleLoadDataEx(void **out, const void *image, unsigned n, int *options, void **values) {
    (void)n, (void)options, (void)values;
    settings_read();
    const char *text = image;
    if (*(const u32 *)image == 0x464c457f || *(const u32 *)image == 0xba55ed50) {
        fprintf(stderr, "[emulated GPU] machine code cannot be run, only PTX\n");
        return CU_INVALID_PTX;
    }
    const char *target = strstr(text, ".target sm_");
    if (target && atoi(target + 11) > settings.cc) {
        fprintf(stderr, "[emulated GPU] PTX for sm_%d, and this GPU is an sm_%d\n", atoi(target + 11), settings.cc);
        return CU_NO_BINARY;
    }
    Module *m = ptx_load(text, current);
    if (!m) return CU_INVALID_PTX;
    pthread_mutex_lock(&module_lock);
    for (Func *f = m->funcs; f; f = f->next)
        if (nfuncs < 4096) all_funcs[nfuncs++] = f;
    pthread_mutex_unlock(&module_lock);
    *out = m;
    return CU_OK;
}
API int cuModuleLoadData(void **out, const void *image) { return cuModuleLoadDataEx(out, image, 0, NULL, NULL); }
API int cuModuleUnload(void *m) {
    ptx_unload(m);
    return CU_OK;
}
API int cuModuleGetFunction(void **out, void *m, const char *name) {
    for (Func *f = ((Module *)m)->funcs; f; f = f->next)
        if (!strcmp(f->name, name)) {
            *out = f;
            return CU_OK;
        }
    return CU_NOT_FOUND;
}
API int cuModuleGetGlobal_v2(u64 *p, size_t *n, void *m, const char *name) {
    for (Symbol *s = ((Module *)m)->globals; s; s = s->next)
        if (!strcmp(s->name, name) && s->space == GLOBAL) {
            if (p) *p = s->address;
            if (n) *n = (size_t)s->size;
            return CU_OK;
        }
    return CU_NOT_FOUND;
}
API int cuFuncGetAttribute(int *v, int a, void *h) {
    Func *f = h;
    switch (a) {
    case 0: *v = f->max_threads ? f->max_threads : 1024; break;
    case 1: *v = f->shared_bytes; break;
    case 3: *v = f->local_bytes; break;
    case 4: *v = f->registers > 255 ? 255 : f->registers; break;
    case 5: case 6: *v = settings.cc; break;
    case 8: *v = f->dynamic_shared_max ? f->dynamic_shared_max : 49152 - f->shared_bytes; break;
    default: *v = 0;
    }
    return CU_OK;
}
API int cuFuncSetAttribute(void *h, int a, int v) {
    if (a == 8) {
        if (v + ((Func *)h)->shared_bytes > 232448) return CU_INVALID_VALUE;
        ((Func *)h)->dynamic_shared_max = v;
    }
    return CU_OK;
}
API int cuFuncSetCacheConfig(void *h, int c) {
    (void)h, (void)c;
    return CU_OK;
}
API int cuFuncGetParamInfo(void *h, size_t i, size_t *offset, size_t *size) {
    Func *f = h;
    if (i >= (size_t)f->nparams) return CU_INVALID_VALUE;
    *offset = (size_t)f->param_offset[i];
    if (size) *size = (size_t)f->param_size[i];
    return CU_OK;
}
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) {
    size_t bytes = shared + (size_t)((Func *)f)->shared_bytes + 1024;
    int by_threads = 2048 / (block ? block : 1), by_shared = (int)(233472 / bytes);
    *n = by_threads < by_shared ? by_threads : by_shared;
    if (*n > 32) *n = 32;
    return CU_OK;
}

static int run_launch(Op *o) { return exec_launch(&o->launch); }

API int cuLaunchKernel(void *h, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                       void **params, void **extra) {
    Func *f = h;
    Stream *s = stream_of(stream);
    int e = device_error(s->device);
    if (e) return e;
    u64 threads = (u64)bx * by * bz;
    if (!threads || threads > 1024 || bx > 1024 || by > 1024 || bz > 64 || !gx || !gy || !gz || gy > 65535 || gz > 65535) {
        fprintf(stderr, "[emulated GPU] kernel %s: a launch of (%u, %u, %u) blocks of (%u, %u, %u) threads is not possible\n", f->name, gx, gy, gz,
                bx, by, bz);
        return CU_INVALID_VALUE;
    }
    if (f->max_threads && threads > (u64)f->max_threads) {
        fprintf(stderr, "[emulated GPU] kernel %s: blocks of %lu threads, and it is compiled for at most %d\n", f->name, threads, f->max_threads);
        return CU_INVALID_VALUE;
    }
    u32 allowed = f->dynamic_shared_max ? (u32)f->dynamic_shared_max : 49152 - (u32)f->shared_bytes;
    if (shared > allowed) {
        fprintf(stderr, "[emulated GPU] kernel %s: %u bytes of dynamic shared memory, %u are allowed without MAX_DYNAMIC_SHARED_SIZE_BYTES\n", f->name,
                shared, allowed);
        return CU_INVALID_VALUE;
    }
    counts.launches++;
    Op *o = op_new(run_launch);
    Launch *L = &o->launch;
    L->f = f, L->shared = shared, L->device = s->device;
    L->grid[0] = gx, L->grid[1] = gy, L->grid[2] = gz, L->block[0] = bx, L->block[1] = by, L->block[2] = bz;
    L->params = calloc(1, (size_t)f->param_bytes + 16);
    if (params) {
        for (int i = 0; i < f->nparams; i++) memcpy(L->params + f->param_offset[i], params[i], (size_t)f->param_size[i]);
    } else if (extra) {
        for (; *extra; extra += 2)
            if (*extra == (void *)1) memcpy(L->params, extra[1], (size_t)f->param_bytes);
    }
    return stream_add(s, o);
}
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned n;
} LaunchConfig;
API int cuLaunchKernelEx(const LaunchConfig *c, void *f, void **params, void **extra) {
    return cuLaunchKernel(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, params, extra);
}

static const struct { int code; const char *name, *text; } texts[] = {
    {CU_OK, "CUDA_SUCCESS", "no error"},
    {CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CU_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "the emulated GPU cannot read the PTX"},
    {CU_NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "the PTX is for a newer GPU than the emulated one"},
    {CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "the emulated GPU found an error in a kernel; it was printed to stderr"},
    {CU_PEER_ALREADY, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CU_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "this cannot be captured"},
    {CU_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture failed before"},
    {CU_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported by the emulated GPU"}};
API int cuGetErrorName(int e, const char **s) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == e) return *s = texts[i].name, CU_OK;
    return *s = "CUDA_ERROR_UNKNOWN", CU_OK;
}
API int cuGetErrorString(int e, const char **s) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == e) return *s = texts[i].text, CU_OK;
    return *s = "unknown error", CU_OK;
}

/* What the host has asked for: kernels, graphs, copies to the device, from it and within, memsets, waits (for a queue, an
 * event, or a copy to memory that is not pinned), allocations and frees of device and pinned memory. */
API void emulator_counts(u64 out[9]) {
    const u64 now[] = {counts.launches, counts.graphs, counts.up, counts.down, counts.within, counts.sets, counts.waits, counts.allocations, counts.frees};
    memcpy(out, now, sizeof now);
}

/* ---- counters --------------------------------------------------------------------------------------------------------- */
__attribute__((destructor)) static void write_stats(void) {
    if (!settings.stats) return;
    char path[4096];
    snprintf(path, sizeof path, "%s", settings.stats_file);
    FILE *f = fopen(path, "a");
    if (!f) return;
    for (int i = 0; i < nfuncs; i++) {
        const Stats *s = &all_funcs[i]->stats;
        if (!s->launches) continue;
        fprintf(f,
                "{\"kernel\": \"%s\", \"launches\": %lu, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"warp_instructions\": %lu, "
                "\"fma\": %lu, \"mma\": %lu, \"load_bytes\": %lu, \"load_sectors\": %lu, \"store_bytes\": %lu, \"store_sectors\": %lu, "
                "\"shared_wavefronts\": %lu, \"shared_extra_wavefronts\": %lu, \"shared_bytes\": %d, \"local_bytes\": %d}\n",
                all_funcs[i]->name, s->launches, s->grid[0], s->grid[1], s->grid[2], s->block[0], s->block[1], s->block[2], s->warp_inst, s->fma, s->mma,
                s->load_bytes, s->load_sectors, s->store_bytes, s->store_sectors, s->shared_access + s->shared_extra, s->shared_extra,
                all_funcs[i]->shared_bytes, all_funcs[i]->local_bytes);
    }
    fclose(f);
}
