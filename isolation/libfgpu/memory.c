/* Memory allocated and freed by address: plain, pitched, managed. */
#include "parts.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fgpu_holdings memory;

void fgpu_memory_lock(void) {
    pthread_mutex_lock(&lock);
}

void fgpu_memory_unlock(void) {
    pthread_mutex_unlock(&lock);
}

void fgpu_memory_forget(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    memory = (struct fgpu_holdings){0}; /* the parent's pages stay: malloc's lock may be taken */
}

/* ---- What is held ---- */

static void release(const struct fgpu_holding *holding) {
    if (holding->from_pool)
        fgpu_pool_freed(holding->owner, holding->bytes);
    else
        fgpu_unclaim(holding->device, holding->bytes);
}

bool fgpu_hold_memory(CUdeviceptr address, struct fgpu_holding holding) {
    struct fgpu_holding before = {0};
    holding.key = address;
    fgpu_memory_lock();
    bool recorded = fgpu_put(&memory, holding, &before);
    fgpu_memory_unlock();
    if (before.key != 0) /* the driver has freed it, through no hook */
        release(&before);
    return recorded;
}

void fgpu_free_begins(CUdeviceptr address, struct fgpu_holding *holding) {
    *holding = (struct fgpu_holding){0};
    fgpu_memory_lock();
    fgpu_remove(&memory, address, holding);
    fgpu_memory_unlock();
}

CUresult fgpu_free_ends(const struct fgpu_holding *holding, CUresult result) {
    if (holding->key != 0 && result == CUDA_SUCCESS)
        release(holding);
    else if (holding->key != 0)
        fgpu_hold_memory(holding->key, *holding);
    return result;
}

void fgpu_release_memory_of(fgpu_owner_test is_gone, const void *data) {
    size_t place = 0;
    while (place < memory.capacity) {
        struct fgpu_holding holding = memory.places[place];
        if (holding.key == 0 || holding.from_pool || !is_gone(holding.owner, holding.device, data)) {
            place++;
            continue;
        }
        fgpu_remove(&memory, holding.key, &holding); /* another one may have moved to this place */
        fgpu_unclaim(holding.device, holding.bytes);
    }
}

/* ---- Allocations ---- */

#define LARGE (UINT64_C(1) << 20) /* larger allocations have their own pages, smaller ones share */
#define PAGE (UINT64_C(2) << 20)

static uint64_t in_pages(uint64_t bytes) {
    if (bytes <= LARGE)
        return fgpu_rounded(bytes);
    return bytes > UINT64_MAX - (PAGE - 1) ? UINT64_MAX : (bytes + PAGE - 1) & ~(PAGE - 1);
}

bool fgpu_begin_claim(struct fgpu_holding *claim, uint64_t bytes) {
    CUcontext context = NULL;
    *claim = (struct fgpu_holding){.device = fgpu_current_context(&context), .bytes = in_pages(bytes)};
    claim->owner = context;
    return fgpu_claim(claim->device, claim->bytes);
}

bool fgpu_end_claim(const struct fgpu_holding *claim, CUdeviceptr key, CUresult *result) {
    bool allocated = *result == CUDA_SUCCESS;
    if (allocated && claim->device >= 0 && fgpu_hold_memory(key, *claim))
        return false;
    fgpu_unclaim(claim->device, claim->bytes);
    if (allocated)
        *result = CUDA_ERROR_OUT_OF_MEMORY;
    return allocated;
}

static inline CUresult end(const struct fgpu_holding *claim, const CUdeviceptr *address, CUresult result) {
    if (fgpu_end_claim(claim, result == CUDA_SUCCESS ? *address : 0, &result))
        DRIVER(cuMemFree_v2)(*address);
    return result;
}

static inline CUresult allocate(__typeof__(&cuMemAlloc_v2) real, CUdeviceptr *address, size_t bytes) {
    struct fgpu_holding claim;
    return fgpu_begin_claim(&claim, bytes) ? end(&claim, address, FGPU_RETRY(real(address, bytes)))
                                           : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_v1(__typeof__(&cuMemAlloc) real, CUdeviceptr_v1 *address, unsigned int bytes) {
    struct fgpu_holding claim;
    if (!fgpu_begin_claim(&claim, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = FGPU_RETRY(real(address, bytes));
    CUdeviceptr wide = result == CUDA_SUCCESS ? *address : 0;
    return end(&claim, &wide, result);
}

static CUresult allocate_managed(__typeof__(&cuMemAllocManaged) real, CUdeviceptr *address, size_t bytes,
                                 unsigned int flags) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (limits != NULL && limits->managed_refused) {
        fgpu_log("managed", "managed memory was asked for, and the limits say managed=refuse: error %d",
                 CUDA_ERROR_NOT_SUPPORTED);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct fgpu_holding claim; /* for managed memory attached to the host too, which may move to the device */
    return fgpu_begin_claim(&claim, bytes) ? end(&claim, address, FGPU_RETRY(real(address, bytes, flags)))
                                           : CUDA_ERROR_OUT_OF_MEMORY;
}

#define USUAL_PITCH 512 /* bytes; every known driver rounds rows up to this */

/* The driver chooses the pitch. The expected one is claimed first, so that nothing is taken without a grant; afterwards
 * the excess is given back, or the rest claimed. */
static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t wide = width > UINT64_MAX - USUAL_PITCH ? UINT64_MAX : (width + USUAL_PITCH - 1) / USUAL_PITCH * USUAL_PITCH;
    return fgpu_product(wide, height);
}

static CUresult end_pitched(struct fgpu_holding *claim, const CUdeviceptr *address, uint64_t bytes, CUresult result) {
    uint64_t claimed = claim->bytes;
    bytes = in_pages(bytes);
    if (result == CUDA_SUCCESS && bytes < claimed) {
        fgpu_unclaim(claim->device, claimed - bytes);
        claim->bytes = bytes;
    } else if (result == CUDA_SUCCESS && bytes > claimed) {
        if (!fgpu_claim(claim->device, bytes - claimed)) {
            DRIVER(cuMemFree_v2)(*address);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            claim->bytes = bytes;
        }
    }
    return end(claim, address, result);
}

static CUresult allocate_pitched(__typeof__(&cuMemAllocPitch_v2) real, CUdeviceptr *address, size_t *pitch,
                                 size_t width, size_t height, unsigned int element) {
    struct fgpu_holding claim;
    if (!fgpu_begin_claim(&claim, pitched(width, height)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = FGPU_RETRY(real(address, pitch, width, height, element));
    return end_pitched(&claim, address, result == CUDA_SUCCESS ? fgpu_product(*pitch, height) : 0, result);
}

static CUresult allocate_pitched_v1(__typeof__(&cuMemAllocPitch) real, CUdeviceptr_v1 *address, unsigned int *pitch,
                                    unsigned int width, unsigned int height, unsigned int element) {
    struct fgpu_holding claim;
    if (!fgpu_begin_claim(&claim, pitched(width, height)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = FGPU_RETRY(real(address, pitch, width, height, element));
    CUdeviceptr wide = result == CUDA_SUCCESS ? *address : 0;
    return end_pitched(&claim, &wide, result == CUDA_SUCCESS ? fgpu_product(*pitch, height) : 0, result);
}

/* ---- Frees ---- */

static inline CUresult free_v2(__typeof__(&cuMemFree_v2) real, CUdeviceptr address) {
    struct fgpu_holding holding;
    fgpu_free_begins(address, &holding);
    return fgpu_free_ends(&holding, real(address));
}

static CUresult free_v1(__typeof__(&cuMemFree) real, CUdeviceptr_v1 address) {
    struct fgpu_holding holding;
    fgpu_free_begins(address, &holding);
    return fgpu_free_ends(&holding, real(address));
}

FGPU_MEMORY_HOOKS(FGPU_EXPORT_GATED_HOOK)
