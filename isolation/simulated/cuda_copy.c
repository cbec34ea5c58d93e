/* Copies and fills: done at the call, as simulated kernels change nothing that they could be ordered with. */
#include "cuda_driver.h"

#include <string.h>

#define STREAM(variable, handle) \
    CUstream variable; \
    do { \
        CUresult stream_ = stream_of(handle, per_thread, &variable); \
        if (stream_) \
            return stream_; \
    } while (0)

static void *host(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* What the driver is told is device memory has to be. */
CUresult copy_line(const struct copy *copy)
{
    if (!copy->bytes)
        return CUDA_SUCCESS;
    if ((copy->to_type == CU_MEMORYTYPE_DEVICE && !span_valid(copy->to, copy->bytes)) ||
        (copy->from_type == CU_MEMORYTYPE_DEVICE && !span_valid(copy->from, copy->bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    memmove(host(copy->to), host(copy->from), copy->bytes);
    return CUDA_SUCCESS;
}

/* In a stream that captures, a node; else at once, after what is in the stream if the caller is to wait for it. */
static CUresult copy_in(struct copy copy, CUstream handle, bool per_thread, bool wait)
{
    if (copy.bytes && (!copy.to || !copy.from))
        return CUDA_ERROR_INVALID_VALUE;
    STREAM(stream, handle);
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEMCPY};
        *memcpy_of(&parameters) = copy;
        return wait ? capture_forbids(stream) : capture_add(stream, &parameters, NULL);
    }
    if (wait) {
        CUresult forbidden = capture_forbids_unsafe();
        if (forbidden)
            return forbidden;
        stream_wait(stream);
    }
    return copy_line(&copy);
}

/* Where only the addresses tell: what the driver knows is device memory, the rest is the host's. */
static CUmemorytype type_of(CUdeviceptr address)
{
    LOCKED;
    return range_at(address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}

#define HOST_SIDE CU_MEMORYTYPE_HOST
#define DEVICE_SIDE CU_MEMORYTYPE_DEVICE

STREAMED(cuMemcpy, 4000, cuMemcpy, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes))
{
    return copy_in((struct copy){type_of(to), type_of(from), to, from, bytes}, NULL, per_thread, true);
}

STREAMED(cuMemcpyAsync, 4000, cuMemcpyAsync, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
         (to, from, bytes, stream))
{
    return copy_in((struct copy){type_of(to), type_of(from), to, from, bytes}, stream, per_thread, false);
}

STREAMED(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void *from, size_t bytes),
         (to, from, bytes))
{
    return copy_in((struct copy){DEVICE_SIDE, HOST_SIDE, to, (uintptr_t)from, bytes}, NULL, per_thread, true);
}

STREAMED(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, _ptds, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes))
{
    return copy_in((struct copy){HOST_SIDE, DEVICE_SIDE, (uintptr_t)to, from, bytes}, NULL, per_thread, true);
}

STREAMED(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
         (to, from, bytes))
{
    return copy_in((struct copy){DEVICE_SIDE, DEVICE_SIDE, to, from, bytes}, NULL, per_thread, true);
}

STREAMED(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, _ptsz,
         (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_in((struct copy){DEVICE_SIDE, HOST_SIDE, to, (uintptr_t)from, bytes}, stream, per_thread, false);
}

STREAMED(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, _ptsz,
         (void *to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_in((struct copy){HOST_SIDE, DEVICE_SIDE, (uintptr_t)to, from, bytes}, stream, per_thread, false);
}

STREAMED(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, _ptsz,
         (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_in((struct copy){DEVICE_SIDE, DEVICE_SIDE, to, from, bytes}, stream, per_thread, false);
}

/* Before CUDA 3.2: 32-bit addresses and sizes. */
CALL(cuMemcpyHtoD, 2000, cuMemcpyHtoD, CUdeviceptr_v1 to, const void *from, unsigned int bytes)
{
    return copy_in((struct copy){DEVICE_SIDE, HOST_SIDE, to, (uintptr_t)from, bytes}, NULL, false, true);
}

CALL(cuMemcpyDtoH, 2000, cuMemcpyDtoH, void *to, CUdeviceptr_v1 from, unsigned int bytes)
{
    return copy_in((struct copy){HOST_SIDE, DEVICE_SIDE, (uintptr_t)to, from, bytes}, NULL, false, true);
}

/* ---- fills ------------------------------------------------------------------------------------------------------- */

CUresult set_2d(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height)
{
    size_t row = width * element;
    if (!row || !height)
        return CUDA_SUCCESS;
    if (to % element || (height > 1 && pitch < row) || !span_valid(to, pitch * (height - 1) + row))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t y = 0; y < height; y++) {
        char *at = host(to + y * pitch);
        if (element == 1)
            memset(at, (int)value, row);
        for (size_t x = 0; element > 1 && x < row; x += element)
            memcpy(at + x, &value, element);
    }
    return CUDA_SUCCESS;
}

static CUresult set_in(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
                       CUstream handle, bool per_thread, bool wait)
{
    STREAM(stream, handle);
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
        *memset_of(&parameters) = (CUDA_MEMSET_NODE_PARAMS){to, pitch, value, element, width, height};
        return wait ? capture_forbids(stream) : capture_add(stream, &parameters, NULL);
    }
    if (wait)
        stream_wait(stream);
    return set_2d(to, pitch, value, element, width, height);
}

#define FILL(bits, type) \
    STREAMED(cuMemsetD##bits, 3020, cuMemsetD##bits##_v2, _ptds, (CUdeviceptr to, type value, size_t count), \
             (to, value, count)) \
    { \
        return set_in(to, 0, value, bits / 8, count, 1, NULL, per_thread, true); \
    } \
    STREAMED(cuMemsetD##bits##Async, 3020, cuMemsetD##bits##Async, _ptsz, \
             (CUdeviceptr to, type value, size_t count, CUstream stream), (to, value, count, stream)) \
    { \
        return set_in(to, 0, value, bits / 8, count, 1, stream, per_thread, false); \
    } \
    STREAMED(cuMemsetD2D##bits, 3020, cuMemsetD2D##bits##_v2, _ptds, \
             (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height), \
             (to, pitch, value, width, height)) \
    { \
        return set_in(to, pitch, value, bits / 8, width, height, NULL, per_thread, true); \
    } \
    STREAMED(cuMemsetD2D##bits##Async, 3020, cuMemsetD2D##bits##Async, _ptsz, \
             (CUdeviceptr to, size_t pitch, type value, size_t width, size_t height, CUstream stream), \
             (to, pitch, value, width, height, stream)) \
    { \
        return set_in(to, pitch, value, bits / 8, width, height, stream, per_thread, false); \
    } \
    CALL(cuMemsetD##bits, 2000, cuMemsetD##bits, CUdeviceptr_v1 to, type value, unsigned int count) \
    { \
        return set_in(to, 0, value, bits / 8, count, 1, NULL, false, true); \
    }

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned int)
