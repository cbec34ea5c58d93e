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

/* A plain copy is a box of one row. */
static CUDA_MEMCPY3D line(CUmemorytype to_type, CUdeviceptr to, CUmemorytype from_type, CUdeviceptr from, size_t bytes)
{
    return (CUDA_MEMCPY3D){.srcMemoryType = from_type,
                           .srcHost = host(from),
                           .srcDevice = from,
                           .dstMemoryType = to_type,
                           .dstHost = host(to),
                           .dstDevice = to,
                           .WidthInBytes = bytes,
                           .Height = 1,
                           .Depth = 1};
}

struct side {
    CUmemorytype type;
    char *start;
    size_t x, y, z, pitch, height;
};

static CUresult side_of(struct side *side, CUmemorytype type, const void *at_host, CUdeviceptr device, CUarray array,
                        const CUDA_MEMCPY3D *copy)
{
    side->type = type;
    if (type == CU_MEMORYTYPE_ARRAY)
        return array_layout(array, &side->start, &side->pitch, &side->height);
    side->start = type == CU_MEMORYTYPE_HOST ? (char *)(uintptr_t)at_host : host(device);
    if (!side->start)
        return CUDA_ERROR_INVALID_VALUE;
    if (!side->pitch)
        side->pitch = copy->WidthInBytes;
    if (!side->height)
        side->height = copy->Height;
    if (side->pitch < side->x + copy->WidthInBytes && (copy->Height > 1 || copy->Depth > 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEMORYTYPE_DEVICE)
        return CUDA_SUCCESS;
    size_t last = ((side->z + copy->Depth - 1) * side->height + side->y + copy->Height - 1) * side->pitch + side->x +
                  copy->WidthInBytes;
    return span_valid(device, last) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult copy_3d(const CUDA_MEMCPY3D *copy)
{
    struct side from = {.x = copy->srcXInBytes, .y = copy->srcY, .z = copy->srcZ, .pitch = copy->srcPitch,
                        .height = copy->srcHeight};
    struct side to = {.x = copy->dstXInBytes, .y = copy->dstY, .z = copy->dstZ, .pitch = copy->dstPitch,
                      .height = copy->dstHeight};
    if (!copy->WidthInBytes || !copy->Height || !copy->Depth)
        return CUDA_SUCCESS;
    CUresult result = side_of(&from, copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcArray, copy);
    if (!result)
        result = side_of(&to, copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstArray, copy);
    if (result)
        return result;
    for (size_t z = 0; z < copy->Depth; z++)
        for (size_t y = 0; y < copy->Height; y++)
            memmove(to.start + ((to.z + z) * to.height + to.y + y) * to.pitch + to.x,
                    from.start + ((from.z + z) * from.height + from.y + y) * from.pitch + from.x, copy->WidthInBytes);
    return CUDA_SUCCESS;
}

/* In a stream that captures, a node; else at once, after what is in the stream if the caller is to wait for it. */
static CUresult copy_in(const CUDA_MEMCPY3D *copy, CUstream handle, bool per_thread, bool wait)
{
    STREAM(stream, handle);
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEMCPY};
        *memcpy_of(&parameters) = (CUDA_MEMCPY_NODE_PARAMS){.copyCtx = stream->context, .copyParams = *copy};
        return wait ? capture_forbids(stream) : capture_add(stream, &parameters, NULL);
    }
    if (wait) {
        CUresult forbidden = capture_forbids_unsafe();
        if (forbidden)
            return forbidden;
        stream_wait(stream);
    }
    return copy_3d(copy);
}

/* Where only the addresses tell: what the driver knows is device memory, the rest is the host's. */
static CUmemorytype type_of(CUdeviceptr address)
{
    LOCKED;
    return range_at(address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
}

static CUresult copy_line(CUmemorytype to_type, CUdeviceptr to, CUmemorytype from_type, CUdeviceptr from, size_t bytes,
                          CUstream stream, bool per_thread, bool wait)
{
    CUDA_MEMCPY3D copy = line(to_type, to, from_type, from, bytes);
    if (bytes && (!to || !from))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_in(&copy, stream, per_thread, wait);
}

#define HOST_SIDE CU_MEMORYTYPE_HOST
#define DEVICE_SIDE CU_MEMORYTYPE_DEVICE

STREAMED(cuMemcpy, 4000, cuMemcpy, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes))
{
    return copy_line(type_of(to), to, type_of(from), from, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyAsync, 4000, cuMemcpyAsync, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
         (to, from, bytes, stream))
{
    return copy_line(type_of(to), to, type_of(from), from, bytes, stream, per_thread, false);
}

STREAMED(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void *from, size_t bytes),
         (to, from, bytes))
{
    return copy_line(DEVICE_SIDE, to, HOST_SIDE, (uintptr_t)from, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, _ptds, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes))
{
    return copy_line(HOST_SIDE, (uintptr_t)to, DEVICE_SIDE, from, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
         (to, from, bytes))
{
    return copy_line(DEVICE_SIDE, to, DEVICE_SIDE, from, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, _ptsz,
         (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_line(DEVICE_SIDE, to, HOST_SIDE, (uintptr_t)from, bytes, stream, per_thread, false);
}

STREAMED(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, _ptsz,
         (void *to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_line(HOST_SIDE, (uintptr_t)to, DEVICE_SIDE, from, bytes, stream, per_thread, false);
}

STREAMED(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, _ptsz,
         (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), (to, from, bytes, stream))
{
    return copy_line(DEVICE_SIDE, to, DEVICE_SIDE, from, bytes, stream, per_thread, false);
}

STREAMED(cuMemcpyPeer, 4000, cuMemcpyPeer, _ptds,
         (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes),
         (to, there, from, here, bytes))
{
    (void)there, (void)here;
    return copy_line(DEVICE_SIDE, to, DEVICE_SIDE, from, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync, _ptsz,
         (CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes, CUstream stream),
         (to, there, from, here, bytes, stream))
{
    (void)there, (void)here;
    return copy_line(DEVICE_SIDE, to, DEVICE_SIDE, from, bytes, stream, per_thread, false);
}

/* Before CUDA 3.2: 32-bit addresses and sizes. */
CALL(cuMemcpyHtoD, 2000, cuMemcpyHtoD, CUdeviceptr_v1 to, const void *from, unsigned int bytes)
{
    return copy_line(DEVICE_SIDE, to, HOST_SIDE, (uintptr_t)from, bytes, NULL, false, true);
}

CALL(cuMemcpyDtoH, 2000, cuMemcpyDtoH, void *to, CUdeviceptr_v1 from, unsigned int bytes)
{
    return copy_line(HOST_SIDE, (uintptr_t)to, DEVICE_SIDE, from, bytes, NULL, false, true);
}

CALL(cuMemcpyDtoD, 2000, cuMemcpyDtoD, CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes)
{
    return copy_line(DEVICE_SIDE, to, DEVICE_SIDE, from, bytes, NULL, false, true);
}

/* ---- boxes --------------------------------------------------------------------------------------------------- */

static CUDA_MEMCPY3D box(const CUDA_MEMCPY2D *flat)
{
    return (CUDA_MEMCPY3D){.srcXInBytes = flat->srcXInBytes,
                           .srcY = flat->srcY,
                           .srcMemoryType = flat->srcMemoryType,
                           .srcHost = flat->srcHost,
                           .srcDevice = flat->srcDevice,
                           .srcArray = flat->srcArray,
                           .srcPitch = flat->srcPitch,
                           .dstXInBytes = flat->dstXInBytes,
                           .dstY = flat->dstY,
                           .dstMemoryType = flat->dstMemoryType,
                           .dstHost = flat->dstHost,
                           .dstDevice = flat->dstDevice,
                           .dstArray = flat->dstArray,
                           .dstPitch = flat->dstPitch,
                           .WidthInBytes = flat->WidthInBytes,
                           .Height = flat->Height,
                           .Depth = 1};
}

/* A unified address says itself what it is. */
static CUresult copy_box(CUDA_MEMCPY3D copy, CUstream stream, bool per_thread, bool wait)
{
    if (copy.srcMemoryType == CU_MEMORYTYPE_UNIFIED) {
        copy.srcMemoryType = type_of(copy.srcDevice);
        copy.srcHost = host(copy.srcDevice);
    }
    if (copy.dstMemoryType == CU_MEMORYTYPE_UNIFIED) {
        copy.dstMemoryType = type_of(copy.dstDevice);
        copy.dstHost = host(copy.dstDevice);
    }
    return copy_in(&copy, stream, per_thread, wait);
}

STREAMED(cuMemcpy2D, 3020, cuMemcpy2D_v2, _ptds, (const CUDA_MEMCPY2D *copy), (copy))
{
    return copy ? copy_box(box(copy), NULL, per_thread, true) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2, _ptds, (const CUDA_MEMCPY2D *copy), (copy))
{
    return copy ? copy_box(box(copy), NULL, per_thread, true) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, _ptsz, (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream))
{
    return copy ? copy_box(box(copy), stream, per_thread, false) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy3D, 3020, cuMemcpy3D_v2, _ptds, (const CUDA_MEMCPY3D *copy), (copy))
{
    return copy ? copy_box(*copy, NULL, per_thread, true) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, _ptsz, (const CUDA_MEMCPY3D *copy, CUstream stream), (copy, stream))
{
    return copy ? copy_box(*copy, stream, per_thread, false) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy3DPeer, 4000, cuMemcpy3DPeer, _ptds, (const CUDA_MEMCPY3D *copy), (copy))
{
    return copy ? copy_box(*copy, NULL, per_thread, true) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpy3DPeerAsync, 4000, cuMemcpy3DPeerAsync, _ptsz, (const CUDA_MEMCPY3D *copy, CUstream stream),
         (copy, stream))
{
    return copy ? copy_box(*copy, stream, per_thread, false) : CUDA_ERROR_INVALID_VALUE;
}

/* ---- arrays of one row ----------------------------------------------------------------------------------------- */

static CUresult with_array(CUarray to_array, CUarray from_array, CUmemorytype other, CUdeviceptr address,
                           size_t to_offset, size_t from_offset, size_t bytes, CUstream stream, bool per_thread,
                           bool wait)
{
    CUDA_MEMCPY3D copy = line(other, address, other, address, bytes);
    copy.srcXInBytes = from_offset;
    copy.dstXInBytes = to_offset;
    if (to_array) {
        copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
        copy.dstArray = to_array;
    }
    if (from_array) {
        copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
        copy.srcArray = from_array;
    }
    return to_array || from_array ? copy_in(&copy, stream, per_thread, wait) : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpyHtoA, 3020, cuMemcpyHtoA_v2, _ptds, (CUarray to, size_t offset, const void *from, size_t bytes),
         (to, offset, from, bytes))
{
    return with_array(to, NULL, HOST_SIDE, (uintptr_t)from, offset, 0, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyAtoH, 3020, cuMemcpyAtoH_v2, _ptds, (void *to, CUarray from, size_t offset, size_t bytes),
         (to, from, offset, bytes))
{
    return with_array(NULL, from, HOST_SIDE, (uintptr_t)to, 0, offset, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyDtoA, 3020, cuMemcpyDtoA_v2, _ptds, (CUarray to, size_t offset, CUdeviceptr from, size_t bytes),
         (to, offset, from, bytes))
{
    return with_array(to, NULL, DEVICE_SIDE, from, offset, 0, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyAtoD, 3020, cuMemcpyAtoD_v2, _ptds, (CUdeviceptr to, CUarray from, size_t offset, size_t bytes),
         (to, from, offset, bytes))
{
    return with_array(NULL, from, DEVICE_SIDE, to, 0, offset, bytes, NULL, per_thread, true);
}

STREAMED(cuMemcpyAtoA, 3020, cuMemcpyAtoA_v2, _ptds,
         (CUarray to, size_t to_offset, CUarray from, size_t from_offset, size_t bytes),
         (to, to_offset, from, from_offset, bytes))
{
    return to && from ? with_array(to, from, DEVICE_SIDE, 0, to_offset, from_offset, bytes, NULL, per_thread, true)
                      : CUDA_ERROR_INVALID_VALUE;
}

STREAMED(cuMemcpyHtoAAsync, 3020, cuMemcpyHtoAAsync_v2, _ptsz,
         (CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream),
         (to, offset, from, bytes, stream))
{
    return with_array(to, NULL, HOST_SIDE, (uintptr_t)from, offset, 0, bytes, stream, per_thread, false);
}

STREAMED(cuMemcpyAtoHAsync, 3020, cuMemcpyAtoHAsync_v2, _ptsz,
         (void *to, CUarray from, size_t offset, size_t bytes, CUstream stream), (to, from, offset, bytes, stream))
{
    return with_array(NULL, from, HOST_SIDE, (uintptr_t)to, 0, offset, bytes, stream, per_thread, false);
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
