/* A driver with a pool that behaves unlike the simulated one: memory that was freed in stream order serves the next
 * allocation at once, but goes back to the device only after a wait for the stream, even if the pool is trimmed. It
 * grows by STEP. With PIECES it grows by pieces as large as an allocation in STEPs; each serves one allocation at a
 * time and stays until the pool is trimmed. With LATE the first LATE plain allocations find no memory, as if the driver
 * had not yet freed a killed process's. One device, one pool, one stream. */
#include "cuda_abi.h"

#include <string.h>

#define API __attribute__((visibility("default")))
#define MIB ((uint64_t)1 << 20)
#ifndef STEP
#define STEP (32 * MIB)
#endif

static uint64_t reserved, used, pending, reserved_high, plain;
static CUdeviceptr next = 0x700000000000;
static struct {
    CUdeviceptr address;
    size_t bytes;
} made[64];

API CUresult cuInit(unsigned int flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    (void)device;
    *context = (CUcontext)8;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    (void)context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)8;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    (void)device;
    memset(uuid->bytes, 0x11, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = 8192 * MIB;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *total = 8192 * MIB;
    *unused = *total - reserved - plain;
    return CUDA_SUCCESS;
}

static CUresult make(CUdeviceptr *address, size_t bytes) {
    for (int i = 0; i < 64; i++) {
        if (made[i].address == 0) {
            *address = made[i].address = next += 1 << 20;
            made[i].bytes = bytes;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_UNKNOWN;
}

static size_t unmake(CUdeviceptr address) {
    for (int i = 0; i < 64; i++) {
        if (made[i].address == address) {
            made[i].address = 0;
            return made[i].bytes;
        }
    }
    return 0;
}

#ifdef PIECES
static struct {
    uint64_t size;
    CUdeviceptr used_by;
} pieces[64];

static CUresult take_piece(CUdeviceptr *address, size_t bytes) {
    int i = 0;
    while (i < 64 && (pieces[i].used_by != 0 || pieces[i].size < bytes))
        i++;
    if (i == 64) {
        for (i = 0; pieces[i].size != 0;)
            i++;
        pieces[i].size = (bytes + STEP - 1) / STEP * STEP;
        reserved += pieces[i].size;
    }
    CUresult result = make(address, bytes);
    pieces[i].used_by = *address;
    return result;
}
#endif

#ifndef LATE
#define LATE 0
#endif

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    static int asked;
    if (asked++ < LATE)
        return CUDA_ERROR_OUT_OF_MEMORY;
    plain += bytes;
    return make(address, bytes);
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    plain -= unmake(address);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    (void)device;
    *pool = (CUmemoryPool)16;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    (void)stream;
#ifdef PIECES
    return take_piece(address, bytes);
#endif
    pending = pending > bytes ? pending - bytes : 0;
    used += bytes;
    while (reserved < used)
        reserved += STEP;
    if (reserved > reserved_high)
        reserved_high = reserved;
    return make(address, bytes);
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    (void)stream;
    size_t bytes = unmake(address);
#ifdef PIECES
    for (int i = 0; i < 64; i++)
        if (pieces[i].used_by == address)
            pieces[i].used_by = 0;
    return CUDA_SUCCESS;
#endif
    used -= bytes;
    pending += bytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    (void)pool;
#ifdef PIECES
    for (int i = 0; i < 64; i++) {
        if (pieces[i].used_by == 0) {
            reserved -= pieces[i].size;
            pieces[i].size = 0;
        }
    }
    return CUDA_SUCCESS;
#endif
    uint64_t least = used + pending > keep ? used + pending : keep;
    if (reserved > least)
        reserved = least;
    return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    pending = 0;
    return cuMemPoolTrimTo(NULL, 0);
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    (void)pool;
    *(cuuint64_t *)value = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH ? reserved_high : reserved;
    return CUDA_SUCCESS;
}
