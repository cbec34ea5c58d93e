/* Memory allocated in stream order. It comes from pools, which the driver enlarges when they have nothing that fits,
 * and shrinks when a program waits for the device. What is charged is what a pool holds (its attribute
 * RESERVED_MEM_CURRENT), not what the program allocated from it. */
#include "parts.h"

#include <stdlib.h>

struct pool {
    CUmemoryPool handle; /* NULL: destroyed, with allocations that are not freed */
    int device;
    bool charges;     /* false: host memory, or another process's */
    uint64_t charged; /* bytes charged for it: what it held at the last check */
    uint64_t used;    /* bytes allocated from it and not freed */
    struct pool *next;
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct pool *pools;
static _Atomic(bool) any; /* whether there may be pools: checked without the lock */

void fgpu_pools_lock(void) {
    pthread_mutex_lock(&lock);
}

void fgpu_pools_unlock(void) {
    pthread_mutex_unlock(&lock);
}

void fgpu_pools_forget(void) {
    lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    pools = NULL;
    atomic_store(&any, false);
}

/* ---- What pools hold ---- */

void fgpu_recharge(int device, uint64_t *charged, uint64_t held) {
    if (held > *charged)
        fgpu_charge_anyway(device, held - *charged);
    else if (held < *charged)
        fgpu_release(device, *charged - held);
    *charged = held;
}

/* The bytes that the pool holds, as the driver says; if it says nothing, as charged. */
static uint64_t held_by(const struct pool *pool) {
    cuuint64_t held = 0;
    __typeof__(&cuMemPoolGetAttribute) get = DRIVER(cuMemPoolGetAttribute);
    if (get == NULL || get(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &held) != CUDA_SUCCESS)
        return pool->charged;
    return held;
}

static void settle(struct pool *pool) {
    if (pool->handle != NULL && pool->charges)
        fgpu_recharge(pool->device, &pool->charged, held_by(pool));
}

void fgpu_pools_settle(int device, bool trim) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return;
    fgpu_pools_lock();
    for (struct pool *pool = pools; pool != NULL; pool = pool->next) {
        if (pool->device != device || pool->handle == NULL || !pool->charges)
            continue;
        if (trim && DRIVER(cuMemPoolTrimTo) != NULL)
            DRIVER(cuMemPoolTrimTo)(pool->handle, 0);
        settle(pool);
    }
    fgpu_pools_unlock();
}

/* ---- Which pool ---- */

static struct pool *find(CUmemoryPool handle) {
    struct pool *pool = pools;
    while (pool != NULL && pool->handle != handle)
        pool = pool->next;
    return pool;
}

static struct pool *add(CUmemoryPool handle, int device, bool charges) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    *pool = (struct pool){.handle = handle, .device = device, .charges = charges, .next = pools};
    pools = pool;
    atomic_store(&any, true);
    return pool;
}

/* Forgets a handle. Its memory stays charged until the last allocation is freed, because the driver keeps it until
 * then. */
static void end(struct pool *pool) {
    pool->handle = NULL;
    if (pool->used != 0)
        return;
    if (pool->charges)
        fgpu_release(pool->device, pool->charged);
    struct pool **place = &pools;
    while (*place != pool)
        place = &(*place)->next;
    *place = pool->next;
    free(pool);
}

void fgpu_pools_drop(int device) {
    fgpu_pools_lock();
    for (struct pool *pool = pools, *next; pool != NULL; pool = next) {
        next = pool->next;
        if (pool->device != device || !pool->charges)
            continue;
        fgpu_release(device, pool->charged);
        pool->charged = 0;
        end(pool);
    }
    fgpu_pools_unlock();
}

static void note(CUmemoryPool handle, CUmemLocation location, CUmemAllocationType type) {
    int device = -1;
    bool charges = fgpu_takes_memory(location, type, &device);
    fgpu_pools_lock();
    if (find(handle) == NULL)
        add(handle, device, charges);
    fgpu_pools_unlock();
}

static int device_of_context(CUcontext context) {
    CUcontext current = NULL, popped;
    int device = fgpu_current_context(&current);
    if (context == current || DRIVER(cuCtxPushCurrent_v2) == NULL || DRIVER(cuCtxPopCurrent_v2) == NULL ||
        DRIVER(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return device;
    device = fgpu_current_device();
    DRIVER(cuCtxPopCurrent_v2)(&popped);
    return device;
}

static int device_of_stream(CUstream stream) {
    CUcontext context;
    __typeof__(&cuStreamGetCtx) get = DRIVER(cuStreamGetCtx);
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || get == NULL ||
        get(stream, &context) != CUDA_SUCCESS)
        return fgpu_current_device();
    return device_of_context(context);
}

/* The device of this default pool. A pool that is no default pool, and was not seen being made, belongs to the stream's
 * device: imported pools cannot be allocated from. */
static int device_of_pool(CUmemoryPool handle, CUstream stream) {
    CUmemoryPool its;
    __typeof__(&cuDeviceGetDefaultMemPool) get = DRIVER(cuDeviceGetDefaultMemPool);
    for (CUdevice ordinal = 0; get != NULL && get(&its, ordinal) == CUDA_SUCCESS; ordinal++)
        if (its == handle)
            return fgpu_device_of(ordinal);
    return device_of_stream(stream);
}

/* The pool of an allocation; a `handle` of NULL means the pool of the stream's device. */
static struct pool *pool_for(CUmemoryPool handle, CUstream stream) {
    int device = -1;
    if (handle == NULL) {
        device = device_of_stream(stream);
        __typeof__(&cuDeviceGetMemPool) get = DRIVER(cuDeviceGetMemPool);
        if (device < 0 || get == NULL || get(&handle, fgpu_ordinal_of(device)) != CUDA_SUCCESS)
            return NULL;
    }
    struct pool *known = find(handle);
    if (known == NULL)
        known = add(handle, device >= 0 ? device : device_of_pool(handle, stream), true);
    return known;
}

/* ---- Allocations ---- */

struct request {
    __typeof__(&cuMemAllocAsync) from_device;
    __typeof__(&cuMemAllocFromPoolAsync) from_pool;
    CUdeviceptr *address;
    size_t bytes;
    CUmemoryPool pool;
    CUstream stream;
    bool per_thread;
};

static CUresult ask(const struct request *request) {
    return request->from_pool ? request->from_pool(request->address, request->bytes, request->pool, request->stream)
                              : request->from_device(request->address, request->bytes, request->stream);
}

static bool is_captured(const struct request *request) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    __typeof__(&cuStreamIsCapturing) get =
        request->per_thread ? DRIVER(cuStreamIsCapturing_ptsz) : DRIVER(cuStreamIsCapturing);
    return get != NULL && get(request->stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* The pool grew above the session's limit. The allocation is freed before the program knows of it, and the stream is
 * waited for, so that the pool can give back what it took. */
static void undo(const struct request *request, struct pool *pool) {
    CUstreamCaptureMode mode = fgpu_relax(CU_STREAM_CAPTURE_MODE_RELAXED);
    if (request->per_thread && DRIVER(cuMemFreeAsync_ptsz) != NULL) {
        DRIVER(cuMemFreeAsync_ptsz)(*request->address, request->stream);
        DRIVER(cuStreamSynchronize_ptsz)(request->stream);
    } else {
        DRIVER(cuMemFreeAsync)(*request->address, request->stream);
        DRIVER(cuStreamSynchronize)(request->stream);
    }
    DRIVER(cuMemPoolTrimTo)(pool->handle, 0);
    fgpu_relax(mode);
    settle(pool);
}

/* ---- How a pool grows ---- */

/* Pools grow in steps of this size: 32 MiB in known drivers; if others are observed, by those, within bounds. Before an
 * allocation the expected growth is claimed, so that a pool is never larger than the session may be. */
#define USUAL_STEP (32 * FGPU_MIB)
#define LARGEST_STEP (64 * FGPU_MIB)
static uint64_t step = USUAL_STEP;

static uint64_t in_steps(uint64_t bytes) {
    return bytes > UINT64_MAX - step ? UINT64_MAX : (bytes + step - 1) / step * step;
}

/* Memory that it holds and nothing uses. Memory freed in stream order counts, as it serves the next allocation in that
 * order. */
static uint64_t free_in(const struct pool *pool) {
    return pool->charged > pool->used ? pool->charged - pool->used : 0;
}

static uint64_t growth_for(const struct pool *pool, uint64_t bytes) {
    return bytes > free_in(pool) ? in_steps(bytes - free_in(pool)) : 0;
}

/* Only a pool without free memory shows its step: if its free memory is fragmented, it grows by all that was asked for.
 */
static void learn(uint64_t unused, uint64_t expected, uint64_t growth) {
    if (unused != 0 || growth == 0 || growth == expected)
        return;
    uint64_t seen = growth & -growth; /* its largest power-of-two factor */
    step = seen < LARGEST_STEP ? seen : LARGEST_STEP;
}

/* Allocates with `claimed` bytes reserved, and charges the pool's growth. */
static CUresult allocate_with(const struct request *request, struct pool *pool, uint64_t claimed) {
    uint64_t unused = free_in(pool), expected = growth_for(pool, fgpu_rounded(request->bytes));
    CUresult result = ask(request);
    uint64_t held = held_by(pool);
    uint64_t growth = held > pool->charged ? held - pool->charged : 0;
    learn(unused, expected, growth);
    bool within = growth <= claimed ||
                  fgpu_reserve_in_force(pool->device, growth - claimed) == FGPU_GRANTED;
    if (within) {
        pool->charged += growth;
        if (growth < claimed)
            fgpu_release(pool->device, claimed - growth);
        settle(pool);
    } else {
        fgpu_release(pool->device, claimed);
        if (result == CUDA_SUCCESS)
            undo(request, pool);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS)
        return result;
    struct fgpu_holding holding = {.bytes = request->bytes, .owner = pool, .device = pool->device, .from_pool = true};
    pool->used += request->bytes;
    if (fgpu_hold_memory(*request->address, holding))
        return CUDA_SUCCESS;
    pool->used -= request->bytes;
    undo(request, pool);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The claim for an allocation: the growth, or if none is expected, the growth if the pool's free memory were
 * fragmented. */
static uint64_t claim_for(const struct pool *pool, uint64_t bytes) {
    uint64_t growth = growth_for(pool, bytes);
    return growth != 0 ? growth : bytes;
}

/* At the limit, the pool's free memory may suffice: tried without a claim, and undone if the pool has grown. As a last
 * resort all unused memory is given back to the device. */
static CUresult allocate_at_the_limit(const struct request *request, struct pool *pool, uint64_t bytes) {
    fgpu_settle(pool->device);
    uint64_t claim = claim_for(pool, bytes);
    if (fgpu_reserve_in_force(pool->device, claim) == FGPU_GRANTED)
        return allocate_with(request, pool, claim);
    if (growth_for(pool, bytes) == 0) {
        CUresult result = allocate_with(request, pool, 0);
        if (result != CUDA_ERROR_OUT_OF_MEMORY)
            return result;
    }
    fgpu_trim(pool->device);
    claim = claim_for(pool, bytes);
    if (fgpu_reserve_in_force(pool->device, claim) == FGPU_GRANTED)
        return allocate_with(request, pool, claim);
    if (step <= USUAL_STEP)
        return CUDA_ERROR_OUT_OF_MEMORY;
    /* If all smaller requests were refused, it would never show that steps are smaller. */
    step = USUAL_STEP;
    claim = claim_for(pool, bytes);
    return fgpu_reserve_in_force(pool->device, claim) == FGPU_GRANTED ? allocate_with(request, pool, claim)
                                                                      : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_in(const struct request *request, struct pool *pool) {
    uint64_t bytes = fgpu_rounded(request->bytes);
    if (!pool->charges)
        return ask(request);
    if (pool->device < 0 || bytes > fgpu_limit_of(pool->device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    fgpu_see_primary(pool->device);
    if (is_captured(request)) {
        fgpu_graph_will_allocate();
        return ask(request);
    }
    uint64_t claim = claim_for(pool, bytes);
    enum fgpu_verdict verdict = fgpu_reserve_in_force(pool->device, claim);
    CUresult result = verdict == FGPU_GRANTED ? allocate_with(request, pool, claim) : CUDA_ERROR_OUT_OF_MEMORY;
    /* If it would have grown by more than the claim, its free memory was fragmented: after giving it back, it may fit.
     */
    return verdict == FGPU_REFUSED || result != CUDA_ERROR_OUT_OF_MEMORY ? result
                                                                        : allocate_at_the_limit(request, pool, bytes);
}

static CUresult serve(const struct request *request) {
    if (fgpu_current_device() == FGPU_UNKNOWN && (request->stream == NULL || request->stream == CU_STREAM_LEGACY ||
                                        request->stream == CU_STREAM_PER_THREAD))
        return ask(request); /* no context: the driver reports it */
    fgpu_pools_lock();
    struct pool *pool = pool_for(request->pool, request->stream);
    CUresult result = pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : allocate_in(request, pool);
    fgpu_pools_unlock();
    return result;
}

static CUresult allocate_async(__typeof__(&cuMemAllocAsync) real, bool per_thread, CUdeviceptr *address, size_t bytes,
                               CUstream stream) {
    return serve(&(struct request){real, NULL, address, bytes, NULL, stream, per_thread});
}

static CUresult allocate_from_pool(__typeof__(&cuMemAllocFromPoolAsync) real, bool per_thread, CUdeviceptr *address,
                                   size_t bytes, CUmemoryPool pool, CUstream stream) {
    if (pool == NULL)
        return real(address, bytes, pool, stream); /* an error that the driver reports best */
    return serve(&(struct request){NULL, real, address, bytes, pool, stream, per_thread});
}

/* ---- Frees ---- */

void fgpu_pool_freed(void *data, uint64_t bytes) {
    struct pool *pool = data;
    fgpu_pools_lock();
    pool->used -= bytes;
    if (pool->handle != NULL)
        settle(pool);
    else
        end(pool);
    fgpu_pools_unlock();
}

static CUresult free_async(__typeof__(&cuMemFreeAsync) real, CUdeviceptr address, CUstream stream) {
    struct fgpu_holding holding;
    fgpu_free_begins(address, &holding);
    return fgpu_free_ends(&holding, real(address, stream));
}

/* ---- Pools ---- */

static CUresult create_pool(__typeof__(&cuMemPoolCreate) real, CUmemoryPool *pool, const CUmemPoolProps *properties) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (properties != NULL && properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED &&
        (limits == NULL || limits->managed_refused))
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = real(pool, properties);
    if (result == CUDA_SUCCESS)
        note(*pool, properties->location, properties->allocType);
    return result;
}

static CUresult get_pool(__typeof__(&cuMemGetMemPool) real, CUmemoryPool *pool, CUmemLocation *location,
                         CUmemAllocationType type) {
    CUresult result = real(pool, location, type);
    if (result == CUDA_SUCCESS)
        note(*pool, *location, type);
    return result;
}

static CUresult destroy_pool(__typeof__(&cuMemPoolDestroy) real, CUmemoryPool handle) {
    fgpu_pools_lock();
    CUresult result = real(handle);
    struct pool *pool = handle == NULL ? NULL : find(handle);
    if (result == CUDA_SUCCESS && pool != NULL)
        end(pool);
    fgpu_pools_unlock();
    return result;
}

static CUresult trim_pool(__typeof__(&cuMemPoolTrimTo) real, CUmemoryPool handle, size_t keep) {
    fgpu_pools_lock();
    CUresult result = real(handle, keep);
    struct pool *pool = handle == NULL ? NULL : find(handle);
    if (pool != NULL)
        settle(pool);
    fgpu_pools_unlock();
    return result;
}

/* A program has waited for the device. */
static CUresult waited(CUresult result) {
    if (!atomic_load_explicit(&any, memory_order_relaxed))
        return result;
    fgpu_pools_lock();
    for (struct pool *pool = pools; pool != NULL; pool = pool->next)
        if (pool->charged > pool->used)
            settle(pool);
    fgpu_pools_unlock();
    return result;
}

static CUresult wait_for_stream(__typeof__(&cuStreamSynchronize) real, bool per_thread, CUstream stream) {
    fgpu_wait_begins(stream, per_thread);
    return waited(real(stream));
}

FGPU_POOL_HOOKS(FGPU_EXPORT_GATED_HOOK)
