/* libnvidia-ml.so.1 of the emulated GPU: what MAX asks before it opens a device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))

static int number(const char *name, int fallback) {
    const char *s = getenv(name);
    return s && *s ? atoi(s) : fallback;
}
API int nvmlInit_v2(void) { return 0; }
API int nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(int e) { return e ? "not supported by the emulated GPU" : "success"; }
API int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = (unsigned)number("ODYSSEY_EMULATED_GPUS", 1);
    return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    *h = (void *)(size_t)(i + 1);
    return 0;
}
API int nvmlDeviceGetHandleByIndex(unsigned i, void **h) { return nvmlDeviceGetHandleByIndex_v2(i, h); }
API int nvmlSystemGetDriverVersion(char *s, unsigned n) {
    snprintf(s, n, "580.65.06");
    return 0;
}
API int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
    int cc = number("ODYSSEY_EMULATED_CC", 90);
    (void)d;
    *major = cc / 10, *minor = cc % 10;
    return 0;
}
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;
API int nvmlDeviceGetPciInfo_v3(void *d, Pci *p) {
    memset(p, 0, sizeof *p);
    p->bus = (unsigned)(size_t)d;
    snprintf(p->legacy, sizeof p->legacy, "0000:%02x:00.0", p->bus & 255);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02x:00.0", p->bus & 255);
    return 0;
}
API int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *pending) {
    (void)d;
    *now = *pending = 0;
    return 0;
}
API int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) {
    (void)d;
    const char *s = getenv("ODYSSEY_EMULATED_MEMORY");
    char *end = "";
    double x = s && *s ? strtod(s, &end) : 1 << 30;
    x *= *end == 'K' ? 1 << 10 : *end == 'M' ? 1 << 20 : *end == 'G' ? 1 << 30 : 1;
    m[0] = m[1] = (unsigned long long)x, m[2] = 0;
    return 0;
}
API int nvmlDeviceGetName(void *d, char *s, unsigned n) {
    (void)d;
    snprintf(s, n, "Emulated GPU");
    return 0;
}
API int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *r) {
    (void)d;
    *r = 0;
    return 0;
}
API int nvmlDeviceGetTotalEccErrors(void *d, int type, int counter, unsigned long long *n) {
    (void)d, (void)type, (void)counter;
    *n = 0;
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *infos) {
    (void)d, (void)infos;
    *n = 0;
    return 0;
}
