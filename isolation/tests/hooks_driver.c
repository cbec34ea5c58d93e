/* A driver with a few functions for look-ups: it has no context, so libfgpu passes each call on to it. VARIANT is the
 * result of its functions; MAKER the DT_SONAME that the test chooses. */
#include "cuda_abi.h"

#include <string.h>

#ifndef VARIANT
#define VARIANT 901
#endif

#define API __attribute__((visibility("default")))

API CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    (void)address;
    (void)bytes;
    return (CUresult)VARIANT;
}

CUresult cuMemAlloc_v9(CUdeviceptr *, size_t);

API CUresult cuMemFree_v2(CUdeviceptr address) {
    (void)address;
    return (CUresult)(VARIANT + 1);
}

/* A version that is missing in the table. */
API CUresult cuMemAlloc_v9(CUdeviceptr *address, size_t bytes) {
    return cuMemAlloc_v2(address, bytes);
}

/* A version of cuMemAlloc that is not exported, like a newer driver's that libfgpu does not know. */
static CUresult newer(CUdeviceptr *address, size_t bytes) {
    return cuMemAlloc_v2(address, bytes);
}

static void *find(const char *symbol, int version) {
    if (strcmp(symbol, "cuMemAlloc") == 0)
        return version >= 99000 ? (void *)newer : (void *)cuMemAlloc_v2;
    if (strcmp(symbol, "cuMemFree") == 0)
        return (void *)cuMemFree_v2;
    if (strcmp(symbol, "cuSomethingElse") == 0)
        return (void *)newer;
    if (strcmp(symbol, "cuGetProcAddress") == 0)
        return (void *)cuGetProcAddress_v2;
    return NULL;
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status) {
    (void)flags;
    *function = find(symbol, version);
    if (status != NULL)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    cuGetProcAddress_v2(symbol, function, version, flags, NULL);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
