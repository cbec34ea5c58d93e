/* Arrays and mipmapped arrays. Sparse ones, and those to be mapped later, have none of their own. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

#define LEVELS 32
#define WITHOUT_MEMORY (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)

struct part {
    CUarrayMapInfo at; /* which part it is the memory of */
    void *memory;
    struct part *next;
};

struct CUarray_st {
    enum magic magic;
    struct device *device;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    size_t bytes, charged;
    CUdeviceptr start;
    CUmipmappedArray of; /* a level's memory is its mipmapped array's */
    struct part *parts;
};

struct CUmipmappedArray_st {
    enum magic magic;
    struct device *device;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    size_t bytes, charged;
    CUdeviceptr start;
    unsigned count;
    struct CUarray_st levels[LEVELS];
    struct part *parts;
};

static size_t format_bytes(int format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 0;
    }
}

static bool measure(struct CUarray_st *array)
{
    const CUDA_ARRAY3D_DESCRIPTOR *shape = &array->shape;
    size_t element = format_bytes((int)shape->Format) * shape->NumChannels;
    return element && (shape->NumChannels == 1 || shape->NumChannels == 2 || shape->NumChannels == 4) &&
           shape->Width && !__builtin_mul_overflow(shape->Width, element, &array->bytes) &&
           !__builtin_mul_overflow(array->bytes, shape->Height ? shape->Height : 1, &array->bytes) &&
           !__builtin_mul_overflow(array->bytes, shape->Depth ? shape->Depth : 1, &array->bytes);
}

static CUresult take(struct device *device, size_t bytes, size_t *charged, CUdeviceptr *start)
{
    CUresult result = device_take(device, bytes, charged);
    if (result)
        return result;
    *start = addresses_reserve(bytes, false);
    if (*start)
        return CUDA_SUCCESS;
    device_give(device, bytes, *charged);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    CURRENT(context);
    CUarray array = out ? calloc(1, sizeof *array) : NULL;
    if (!array)
        return out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    array->magic = ARRAY;
    array->device = context->device;
    array->shape = *shape;
    CUresult result = measure(array) ? capture_forbids_unsafe() : CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    if (!result && !(shape->Flags & WITHOUT_MEMORY))
        result = take(array->device, array->bytes, &array->charged, &array->start);
    if (result)
        free(array);
    else
        *out = array;
    return result;
}

CALL(cuArrayCreate, 3020, cuArrayCreate_v2, CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){shape->Width, shape->Height, 0, shape->Format, shape->NumChannels, 0});
}

CALL(cuArrayCreate, 2000, cuArrayCreate, CUarray *out, const CUDA_ARRAY_DESCRIPTOR_v1 *shape)
{
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){shape->Width, shape->Height, 0, shape->Format, shape->NumChannels, 0});
}

CALL(cuArray3DCreate, 3020, cuArray3DCreate_v2, CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    return shape ? create(out, shape) : CUDA_ERROR_INVALID_VALUE;
}

CALL(cuArray3DCreate, 2000, cuArray3DCreate, CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *shape)
{
    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    return create(out, &(CUDA_ARRAY3D_DESCRIPTOR){shape->Width, shape->Height, shape->Depth, shape->Format,
                                                  shape->NumChannels, shape->Flags});
}

static void drop_parts(struct part **parts)
{
    while (*parts) {
        struct part *part = *parts;
        *parts = part->next;
        physical_unmap(part->memory);
        free(part);
    }
}

#define ARRAY_OF(array) \
    READY(); \
    LOCKED; \
    if (!(array) || (array)->magic != ARRAY) \
    return CUDA_ERROR_INVALID_HANDLE

CALL(cuArrayDestroy, 2000, cuArrayDestroy, CUarray array)
{
    ARRAY_OF(array);
    if (array->of)
        return CUDA_ERROR_INVALID_HANDLE;
    if (array->start) {
        addresses_release(array->start, array->bytes);
        device_give(array->device, array->bytes, array->charged);
    }
    drop_parts(&array->parts);
    array->magic = 0;
    free(array);
    return CUDA_SUCCESS;
}

/* ---- mipmapped arrays --------------------------------------------------------------------------------------- */

static size_t halved(size_t length)
{
    return length > 1 ? length / 2 : length;
}

CALL(cuMipmappedArrayCreate, 5000, cuMipmappedArrayCreate, CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape,
     unsigned int levels)
{
    CURRENT(context);
    if (!out || !shape || !levels)
        return CUDA_ERROR_INVALID_VALUE;
    CUmipmappedArray mipmap = calloc(1, sizeof *mipmap);
    if (!mipmap)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mipmap->magic = MIPMAP;
    mipmap->device = context->device;
    mipmap->shape = *shape;
    CUDA_ARRAY3D_DESCRIPTOR level = *shape;
    CUresult result = capture_forbids_unsafe();
    while (!result && mipmap->count < levels && mipmap->count < LEVELS) {
        struct CUarray_st *array = &mipmap->levels[mipmap->count++];
        *array = (struct CUarray_st){.magic = ARRAY, .device = mipmap->device, .shape = level, .of = mipmap};
        if (!measure(array))
            result = CUDA_ERROR_INVALID_VALUE;
        mipmap->bytes += array->bytes;
        if (level.Width <= 1 && level.Height <= 1 && level.Depth <= 1)
            break;
        level.Width = halved(level.Width);
        level.Height = halved(level.Height);
        level.Depth = halved(level.Depth);
    }
    LOCKED;
    if (!result && !(shape->Flags & WITHOUT_MEMORY))
        result = take(mipmap->device, mipmap->bytes, &mipmap->charged, &mipmap->start);
    if (result) {
        free(mipmap);
        return result;
    }
    CUdeviceptr at = mipmap->start;
    for (unsigned i = 0; at && i < mipmap->count; at += mipmap->levels[i++].bytes)
        mipmap->levels[i].start = at;
    *out = mipmap;
    return CUDA_SUCCESS;
}

#define MIPMAP_OF(mipmap) \
    READY(); \
    LOCKED; \
    if (!(mipmap) || (mipmap)->magic != MIPMAP) \
    return CUDA_ERROR_INVALID_HANDLE

CALL(cuMipmappedArrayDestroy, 5000, cuMipmappedArrayDestroy, CUmipmappedArray mipmap)
{
    MIPMAP_OF(mipmap);
    if (mipmap->start) {
        addresses_release(mipmap->start, mipmap->bytes);
        device_give(mipmap->device, mipmap->bytes, mipmap->charged);
    }
    drop_parts(&mipmap->parts);
    mipmap->magic = 0;
    free(mipmap);
    return CUDA_SUCCESS;
}

/* ---- memory mapped later --------------------------------------------------------------------------------------- */

static bool same_part(const CUarrayMapInfo *a, const CUarrayMapInfo *b)
{
    return a->subresourceType == b->subresourceType && !memcmp(&a->subresource, &b->subresource, sizeof a->subresource);
}

static CUresult map_part(const CUarrayMapInfo *info)
{
    struct part **place;
    if (info->resourceType == CU_RESOURCE_TYPE_ARRAY && info->resource.array && info->resource.array->magic == ARRAY)
        place = &info->resource.array->parts;
    else if (info->resourceType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY && info->resource.mipmap &&
             info->resource.mipmap->magic == MIPMAP)
        place = &info->resource.mipmap->parts;
    else
        return CUDA_ERROR_INVALID_VALUE;
    while (*place && !same_part(&(*place)->at, info))
        place = &(*place)->next;
    struct part *part = *place;
    if (part) {
        *place = part->next;
        physical_unmap(part->memory);
        free(part);
    }
    if (info->memOperationType == CU_MEM_OPERATION_TYPE_UNMAP)
        return part ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    part = calloc(1, sizeof *part);
    if (!part || !physical_map(info->memHandle.memHandle, &part->memory)) {
        free(part);
        return CUDA_ERROR_INVALID_VALUE;
    }
    part->at = *info;
    part->next = *place;
    *place = part;
    return CUDA_SUCCESS;
}

STREAMED(cuMemMapArrayAsync, 11010, cuMemMapArrayAsync, _ptsz,
         (CUarrayMapInfo * list, unsigned int count, CUstream handle), (list, count, handle))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (!result)
        result = capture_forbids(stream);
    if (!result && !list)
        result = CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    for (unsigned i = 0; !result && i < count; i++)
        result = map_part(&list[i]);
    return result;
}
