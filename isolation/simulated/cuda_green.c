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
    CUdevResource resource;
    CUcontext context;
};

#define MIN_PART 8

static CUresult whole(struct device *device, CUdevResource *out, CUdevResourceType type)
{
    if (!out || type != CU_DEV_RESOURCE_TYPE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    memset(out, 0, sizeof *out);
    out->type = CU_DEV_RESOURCE_TYPE_SM;
    out->sm.smCount = device->machine->sm_count;
    out->sm.minSmPartitionSize = MIN_PART;
    out->sm.smCoscheduledAlignment = MIN_PART;
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetDevResource, 12040, cuDeviceGetDevResource, CUdevice ordinal, CUdevResource *out,
     CUdevResourceType type)
{
    READY();
    struct device *device = device_of(ordinal);
    return device ? whole(device, out, type) : CUDA_ERROR_INVALID_DEVICE;
}

CALL(cuDevSmResourceSplitByCount, 12040, cuDevSmResourceSplitByCount, CUdevResource *out, unsigned int *groups,
     const CUdevResource *input, CUdevResource *rest, unsigned int flags, unsigned int least)
{
    READY();
    if (!groups || !input || input->type != CU_DEV_RESOURCE_TYPE_SM || flags & ~3u)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned size = least < MIN_PART ? MIN_PART : (least + MIN_PART - 1) / MIN_PART * MIN_PART;
    unsigned possible = input->sm.smCount / size;
    unsigned count = out ? (*groups < possible ? *groups : possible) : possible;
    if (!possible)
        return (CUresult)915; /* CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION */
    for (unsigned i = 0; out && i < count; i++) {
        out[i] = *input;
        out[i].sm.smCount = size;
    }
    if (rest) {
        *rest = *input;
        rest->sm.smCount = input->sm.smCount - count * size;
        if (!rest->sm.smCount)
            rest->type = CU_DEV_RESOURCE_TYPE_INVALID;
    }
    *groups = count;
    return CUDA_SUCCESS;
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
    green->resource = description->resource;
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

CALL(cuGreenCtxStreamCreate, 12050, cuGreenCtxStreamCreate, CUstream *out, CUgreenCtx green, unsigned int flags,
     int priority)
{
    GREEN_OF(green);
    if (!out || flags != CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = malloc(sizeof *stream);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream_init(stream, green->context, flags, priority);
    stream->green = green;
    *out = stream;
    return CUDA_SUCCESS;
}
