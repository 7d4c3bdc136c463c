/* Functions of the CUDA driver that MAX's run time knows and the emulated GPU has not: they say so once, when asked. */
#include "emulator.h"

static int missing(const char *name, bool *said) {
    if (settings.verbose && !*said) fprintf(stderr, "[emulated GPU] %s is not emulated\n", name);
    *said = true;
    return CU_NOT_SUPPORTED;
}
#define MISSING(name)                                                                                                  \
    API int name(void) {                                                                                               \
        static bool said;                                                                                              \
        return missing(#name, &said);                                                                                  \
    }

MISSING(cuDeviceGetGraphMemAttribute)
MISSING(cuGraphAddChildGraphNode)
MISSING(cuGraphAddEmptyNode)
MISSING(cuGraphAddKernelNode)
MISSING(cuGraphAddMemcpyNode)
MISSING(cuGraphAddMemsetNode)
MISSING(cuGraphCreate)
MISSING(cuGraphDebugDotPrint)
MISSING(cuGraphInstantiateWithParams)
MISSING(cuGraphKernelNodeSetAttribute)
MISSING(cuMemAddressFree)
MISSING(cuMemAddressReserve)
MISSING(cuMemCreate)
MISSING(cuMemExportToShareableHandle)
MISSING(cuMemGetAllocationGranularity)
MISSING(cuMemGetHandleForAddressRange)
MISSING(cuMemMap)
MISSING(cuMemPoolTrimTo)
MISSING(cuMemRelease)
MISSING(cuMemSetAccess)
MISSING(cuMemUnmap)
MISSING(cuMemcpyBatch)
MISSING(cuMemcpyBatchAsync)
MISSING(cuMemset)
MISSING(cuMulticastAddDevice)
MISSING(cuMulticastBindMem)
MISSING(cuMulticastCreate)
MISSING(cuMulticastGetGranularity)
MISSING(cuMulticastUnbind)
MISSING(cuPointerSetAttribute)
MISSING(cuStreamWaitValue64_v2)
MISSING(cuTensorMapEncodeIm2col)
