/* Green contexts: parts of a device's multiprocessors. Here they only exist: a simulated device serves one kernel after
 * another, whatever part it was meant for. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

struct CUdevResourceDesc_st {
    CUdevResource resource;
};

struct CUgreenCtx_st {
    enum magic magic;
    struct device *device;
    CUcontext context;
};

static CUresult whole(struct device *device, CUdevResource *out, CUdevResourceType type)
{
    if (!out || type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    out->type = CU_DEV_RESOURCE_TYPE_SM;
    out->sm.smCount = device->machine->sm_count;
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetDevResource, 12040, cuDeviceGetDevResource, CUdevice ordinal, CUdevResource *out,
     CUdevResourceType type)
{
    READY();
    struct device *device = device_of(ordinal);
    return device ? whole(device, out, type) : CUDA_ERROR_INVALID_DEVICE;
}

/* A description is never given back: the interface has no call for it. */
CALL(cuDevResourceGenerateDesc, 12040, cuDevResourceGenerateDesc, CUdevResourceDesc *out, CUdevResource *resources,
     unsigned int count)
{
    READY();
    if (!out || !resources || !count || resources->type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    CUdevResourceDesc description = calloc(1, sizeof *description);
    if (!description)
        return CUDA_ERROR_OUT_OF_MEMORY;
    description->resource = resources[0];
    for (unsigned i = 1; i < count; i++)
        description->resource.sm.smCount += resources[i].sm.smCount;
    *out = description;
    return CUDA_SUCCESS;
}

CALL(cuGreenCtxCreate, 12040, cuGreenCtxCreate, CUgreenCtx *out, CUdevResourceDesc description, CUdevice ordinal,
     unsigned int flags)
{
    READY();
    struct device *device = device_of(ordinal);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || !description || flags != CU_GREEN_CTX_DEFAULT_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUcontext primary;
    CUgreenCtx green = calloc(1, sizeof *green);
    CUresult result = green ? primary_retain(device, &primary) : CUDA_ERROR_OUT_OF_MEMORY;
    if (!result && (result = context_create_green(device, green, &green->context)))
        primary_release(device);
    if (result) {
        free(green);
        return result;
    }
    green->magic = GREEN;
    green->device = device;
    *out = green;
    return CUDA_SUCCESS;
}

#define GREEN_OF(green) \
    READY(); \
    LOCKED; \
    if (!(green) || (green)->magic != GREEN) \
    return CUDA_ERROR_INVALID_HANDLE

CALL(cuGreenCtxDestroy, 12040, cuGreenCtxDestroy, CUgreenCtx green)
{
    GREEN_OF(green);
    context_destroy(green->context);
    primary_release(green->device);
    green->magic = 0;
    free(green);
    return CUDA_SUCCESS;
}

CALL(cuCtxFromGreenCtx, 12040, cuCtxFromGreenCtx, CUcontext *out, CUgreenCtx green)
{
    GREEN_OF(green);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = green->context;
    return CUDA_SUCCESS;
}
