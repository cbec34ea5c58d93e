/* Pools of stream-ordered memory. A pool takes memory from its device in chunks, and keeps what is freed until the next
 * synchronisation, or for longer up to its release threshold. */
#include "cuda_driver.h"

#include <stdlib.h>

#define CHUNK (UINT64_C(32) << 20)
#define SMALL_CHUNK (UINT64_C(2) << 20) /* where the device has no large one left */
#define UNIT 512

struct CUmemPoolHandle_st {
    struct device *device;
    bool is_default, destroyed;
    uint64_t threshold, used, used_high, reserved, reserved_high, most;
    int reuse[4];
    struct CUmemPoolHandle_st *next;
};

static CUmemoryPool pools;

static uint64_t rounded(uint64_t bytes, uint64_t to)
{
    return (bytes + to - 1) / to * to;
}

/* Looked for rather than looked at: it may be gone. */
static bool usable(CUmemoryPool pool)
{
    CUmemoryPool known = pools;
    while (known && known != pool)
        known = known->next;
    return known && !known->destroyed;
}

static CUmemoryPool create(struct device *device, uint64_t most)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    *pool = (struct CUmemPoolHandle_st){
        .device = device, .most = most, .reuse = {0, 1, 1, 1}, .next = pools};
    pools = pool;
    return pool;
}

CUmemoryPool default_pool(struct device *device)
{
    if (!device->default_pool && (device->default_pool = create(device, 0)))
        device->default_pool->is_default = true;
    return device->default_pool;
}

static CUmemoryPool current_pool(struct device *device)
{
    return device->pool ? device->pool : default_pool(device);
}

/* A destroyed pool goes with the last of its memory. */
static void shrink(CUmemoryPool pool, uint64_t keep)
{
    uint64_t least = pool->used > keep ? pool->used : keep;
    if (least < pool->reserved) {
        uint64_t target = rounded(least, SMALL_CHUNK);
        ledger_give(pool->device->machine, pool->reserved - target);
        pool->reserved = target;
    }
    if (!pool->destroyed || pool->used)
        return;
    for (CUmemoryPool *place = &pools; *place; place = &(*place)->next)
        if (*place == pool) {
            *place = pool->next;
            break;
        }
    free(pool);
}

static CUresult grow(CUmemoryPool pool, uint64_t bytes)
{
    uint64_t needed = pool->used + bytes;
    if (needed <= pool->reserved)
        return CUDA_SUCCESS;
    uint64_t more = rounded(needed - pool->reserved, CHUNK);
    if ((pool->most && pool->reserved + more > pool->most) || !ledger_take(pool->device->machine, more)) {
        more = rounded(needed - pool->reserved, SMALL_CHUNK);
        if ((pool->most && pool->reserved + more > pool->most) || !ledger_take(pool->device->machine, more))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->reserved += more;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

CUresult pool_allocate(CUmemoryPool pool, CUcontext context, size_t bytes, CUdeviceptr *out)
{
    size_t charged = rounded(bytes, UNIT);
    if (charged < bytes || charged > pool->device->machine->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = grow(pool, charged);
    if (result)
        return result;
    CUdeviceptr start = addresses_reserve(bytes, false);
    struct range *range = start ? range_add(start, bytes, POOLED, context) : NULL;
    if (!range) {
        if (start)
            addresses_release(start, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    range->device = pool->device;
    range->pool = pool;
    range->charged = charged;
    pool->used += charged;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    *out = start;
    return CUDA_SUCCESS;
}

void pool_free(struct range *range)
{
    CUmemoryPool pool = range->pool;
    CUdeviceptr start = range->start;
    size_t bytes = range->bytes;
    pool->used -= range->charged;
    range_remove(range);
    addresses_release(start, bytes);
    if (pool->destroyed)
        shrink(pool, 0);
}

void pools_release(struct device *device)
{
    LOCKED;
    for (CUmemoryPool pool = pools, next; pool; pool = next) {
        next = pool->next;
        if (pool->device == device)
            shrink(pool, pool->threshold);
    }
}

static bool of_device(const struct range *range, void *device)
{
    return range->kind == POOLED && range->device == device;
}

void pools_reset(struct device *device)
{
    range_each(of_device, device, pool_free);
    for (CUmemoryPool pool = pools, next; pool; pool = next) {
        next = pool->next;
        if (pool->device == device)
            shrink(pool, 0);
    }
}

/* ---- allocating --------------------------------------------------------------------------------------------- */

static CUresult allocate(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, bool chosen, CUstream handle,
                         bool per_thread)
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    LOCKED;
    if (!out || !bytes || (chosen && !usable(pool)))
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        CUgraphNode node = NULL;
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
        struct device *device = pool ? pool->device : stream->context->device;
        parameters.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        parameters.alloc.poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal};
        parameters.alloc.bytesize = bytes;
        result = capture_add(stream, &parameters, &node);
        if (!result)
            *out = node->parameters.alloc.dptr;
        return result;
    }
    if (!pool && !(pool = current_pool(stream->context->device)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return pool_allocate(pool, stream->context, bytes, out);
}

STREAMED(cuMemAllocAsync, 11020, cuMemAllocAsync, _ptsz, (CUdeviceptr * out, size_t bytes, CUstream stream),
         (out, bytes, stream))
{
    return allocate(out, bytes, NULL, false, stream, per_thread);
}

STREAMED(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, _ptsz,
         (CUdeviceptr * out, size_t bytes, CUmemoryPool pool, CUstream stream), (out, bytes, pool, stream))
{
    return allocate(out, bytes, pool, true, stream, per_thread);
}

STREAMED(cuMemFreeAsync, 11020, cuMemFreeAsync, _ptsz, (CUdeviceptr address, CUstream handle), (address, handle))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result)
        return result;
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};
        parameters.free.dptr = address;
        return capture_add(stream, &parameters, NULL);
    }
    struct range *range = range_at(address);
    if (!range || range->start != address)
        return CUDA_ERROR_INVALID_VALUE;
    if (range->kind == POOLED)
        pool_free(range);
    else if (range->kind == GRAPHED)
        graph_memory_free(range);
    else if (range->kind == PLAIN)
        return memory_free(address);
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* ---- pools --------------------------------------------------------------------------------------------------- */

#define POOL_OF(pool) \
    READY(); \
    LOCKED; \
    if (!usable(pool)) \
    return CUDA_ERROR_INVALID_VALUE

CALL(cuMemPoolCreate, 11020, cuMemPoolCreate, CUmemoryPool *out, const CUmemPoolProps *properties)
{
    READY();
    LOCKED;
    if (!out || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct device *device = device_of(properties->location.id);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = create(device, properties->maxSize);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CALL(cuMemPoolDestroy, 11020, cuMemPoolDestroy, CUmemoryPool pool)
{
    POOL_OF(pool);
    if (pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    if (pool->device->pool == pool)
        pool->device->pool = NULL;
    pool->destroyed = true;
    shrink(pool, 0);
    return CUDA_SUCCESS;
}

CALL(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo, CUmemoryPool pool, size_t keep)
{
    POOL_OF(pool);
    shrink(pool, keep);
    return CUDA_SUCCESS;
}

CALL(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute, CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    POOL_OF(pool);
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = pool->reuse[attribute];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = pool->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = pool->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* The high marks can only be set back. */
CALL(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute, CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    POOL_OF(pool);
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse[attribute] = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(cuuint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
            pool->used_high = pool->used;
        else
            pool->reserved_high = pool->reserved;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- a device's default and current pool ------------------------------------------------------------------------- */

#define DEVICE(variable, ordinal) \
    READY(); \
    LOCKED; \
    struct device *variable = device_of(ordinal); \
    if (!variable) \
    return CUDA_ERROR_INVALID_DEVICE

static CUresult give_pool(CUmemoryPool *out, CUmemoryPool pool)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = pool;
    return pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CALL(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool, CUmemoryPool *out, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    return give_pool(out, default_pool(device));
}

CALL(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool, CUmemoryPool *out, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    return give_pool(out, current_pool(device));
}

static struct device *at_location(const CUmemLocation *location, CUmemAllocationType type)
{
    bool right = location && location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
    return right ? device_of(location->id) : NULL;
}

CALL(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool, CUmemoryPool *out, CUmemLocation *location,
     CUmemAllocationType type)
{
    READY();
    LOCKED;
    struct device *device = at_location(location, type);
    return device ? give_pool(out, default_pool(device)) : CUDA_ERROR_NOT_SUPPORTED;
}

CALL(cuMemGetMemPool, 13000, cuMemGetMemPool, CUmemoryPool *out, CUmemLocation *location, CUmemAllocationType type)
{
    READY();
    LOCKED;
    struct device *device = at_location(location, type);
    return device ? give_pool(out, current_pool(device)) : CUDA_ERROR_NOT_SUPPORTED;
}
