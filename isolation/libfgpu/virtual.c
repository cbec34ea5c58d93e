/* Memory that a program creates and maps anywhere. It is held while there is a handle of it or a mapping. */
#include "parts.h"

#include <stdlib.h>

struct allocation {
    uint64_t bytes;
    int device;
    uint64_t handles, mappings;
};

/* A part of a sparse array to which an allocation is mapped. Unmapping of parts is not tracked: an allocation that was
 * mapped into an array stays charged until the array is destroyed. */
struct array_mapping {
    const void *array;
    struct allocation *allocation;
    struct array_mapping *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fgpu_holdings handles; /* the owner is the allocation; `bytes`: how often the handle must be released */
static struct fgpu_holdings mappings; /* by address; the owner is NULL for imported memory */
static struct array_mapping *array_mappings;

void fgpu_virtual_forget(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    handles = mappings = (struct fgpu_holdings){0};
    array_mappings = NULL;
}

static void drop_if_unused(struct allocation *allocation) {
    if (allocation->handles != 0 || allocation->mappings != 0)
        return;
    fgpu_unclaim(allocation->device, allocation->bytes);
    free(allocation);
}

static void drop_mapping(struct allocation *allocation) {
    if (allocation == NULL)
        return;
    allocation->mappings--;
    drop_if_unused(allocation);
}

/* ---- Handles ---- */

static bool add_handle(CUmemGenericAllocationHandle handle, struct allocation *allocation) {
    struct fgpu_holding *known = fgpu_get(&handles, handle), before = {0};
    if (known != NULL && known->owner == allocation) {
        known->bytes++;
    } else {
        if (!fgpu_put(&handles, (struct fgpu_holding){.key = handle, .bytes = 1, .owner = allocation}, &before))
            return false;
        if (before.key != 0) { /* released unnoticed */
            struct allocation *gone = before.owner;
            gone->handles -= before.bytes;
            drop_if_unused(gone);
        }
    }
    allocation->handles++;
    return true;
}

static CUresult create_claimed(__typeof__(&cuMemCreate) real, CUmemGenericAllocationHandle *handle, size_t bytes,
                               const CUmemAllocationProp *properties, unsigned long long flags, int device) {
    struct allocation *allocation = calloc(1, sizeof *allocation);
    if (allocation == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *allocation = (struct allocation){.bytes = bytes, .device = device};
    pthread_mutex_lock(&lock);
    CUresult result = FGPU_RETRY(real(handle, bytes, properties, flags));
    if (result == CUDA_SUCCESS && (device < 0 || !add_handle(*handle, allocation))) {
        DRIVER(cuMemRelease)(*handle);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    if (result != CUDA_SUCCESS)
        free(allocation);
    return result;
}

static CUresult create(__typeof__(&cuMemCreate) real, CUmemGenericAllocationHandle *handle, size_t bytes,
                       const CUmemAllocationProp *properties, unsigned long long flags) {
    const struct fgpu_limits *limits = fgpu_limits();
    int device;
    if (properties == NULL || !fgpu_takes_memory(properties->location, properties->type, &device))
        return real(handle, bytes, properties, flags);
    if (properties->type == CU_MEM_ALLOCATION_TYPE_MANAGED && (limits == NULL || limits->managed_refused))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!fgpu_claim(device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = create_claimed(real, handle, bytes, properties, flags, device);
    if (result != CUDA_SUCCESS)
        fgpu_unclaim(device, bytes);
    return result;
}

static CUresult release(__typeof__(&cuMemRelease) real, CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    CUresult result = real(handle);
    struct fgpu_holding *known = result == CUDA_SUCCESS ? fgpu_get(&handles, handle) : NULL;
    if (known != NULL) {
        struct allocation *allocation = known->owner;
        struct fgpu_holding gone;
        if (--known->bytes == 0)
            fgpu_remove(&handles, handle, &gone);
        allocation->handles--;
        drop_if_unused(allocation);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static struct fgpu_holding *mapping_around(CUdeviceptr address) {
    struct fgpu_holding *found = fgpu_get(&mappings, address);
    for (size_t i = 0; found == NULL && i < mappings.capacity; i++)
        if (mappings.places[i].key != 0 && address - mappings.places[i].key < mappings.places[i].bytes)
            found = &mappings.places[i];
    return found;
}

static CUresult retain(__typeof__(&cuMemRetainAllocationHandle) real, CUmemGenericAllocationHandle *handle,
                       void *address) {
    pthread_mutex_lock(&lock);
    CUresult result = real(handle, address);
    struct fgpu_holding *known = result == CUDA_SUCCESS ? mapping_around((CUdeviceptr)(uintptr_t)address) : NULL;
    if (known != NULL && known->owner != NULL && !add_handle(*handle, known->owner)) {
        DRIVER(cuMemRelease)(*handle);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- Mappings ---- */

static CUresult map(__typeof__(&cuMemMap) real, CUdeviceptr address, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    CUresult result = real(address, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS) {
        struct fgpu_holding *known = fgpu_get(&handles, handle), before = {0};
        struct allocation *allocation = known == NULL ? NULL : known->owner;
        if (allocation != NULL)
            allocation->mappings++;
        /* Without memory for the record the allocation stays charged. */
        fgpu_put(&mappings, (struct fgpu_holding){.key = address, .bytes = bytes, .owner = allocation}, &before);
        if (before.key != 0)
            drop_mapping(before.owner);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* A range covers whole mappings, usually consecutive ones. */
static void forget_mappings(CUdeviceptr address, size_t bytes) {
    CUdeviceptr at = address, end = address + bytes;
    struct fgpu_holding gone;
    while (at < end && fgpu_remove(&mappings, at, &gone)) {
        drop_mapping(gone.owner);
        at += gone.bytes;
    }
    if (at >= end)
        return;
    for (size_t i = 0; i < mappings.capacity;) {
        uint64_t key = mappings.places[i].key;
        if (key >= at && key < end && fgpu_remove(&mappings, key, &gone))
            drop_mapping(gone.owner); /* another one may have moved to this place */
        else
            i++;
    }
}

static CUresult unmap(__typeof__(&cuMemUnmap) real, CUdeviceptr address, size_t bytes) {
    pthread_mutex_lock(&lock);
    CUresult result = real(address, bytes);
    if (result == CUDA_SUCCESS)
        forget_mappings(address, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- Sparse arrays ---- */

static void add_array_mapping(const void *array, struct allocation *allocation) {
    for (struct array_mapping *known = array_mappings; known != NULL; known = known->next)
        if (known->array == array && known->allocation == allocation)
            return;
    struct array_mapping *mapping = malloc(sizeof *mapping);
    allocation->mappings++; /* even without memory for the record: then it stays charged */
    if (mapping == NULL)
        return;
    *mapping = (struct array_mapping){array, allocation, array_mappings};
    array_mappings = mapping;
}

static CUresult map_arrays(__typeof__(&cuMemMapArrayAsync) real, CUarrayMapInfo *list, unsigned int count,
                           CUstream stream) {
    pthread_mutex_lock(&lock);
    CUresult result = real(list, count, stream);
    for (unsigned int i = 0; result == CUDA_SUCCESS && i < count; i++) {
        struct fgpu_holding *known = list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP
                                         ? fgpu_get(&handles, list[i].memHandle.memHandle)
                                         : NULL;
        if (known != NULL)
            add_array_mapping(list[i].resource.array, known->owner);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

void fgpu_array_unmapped(const void *array) {
    pthread_mutex_lock(&lock);
    for (struct array_mapping **place = &array_mappings; *place != NULL;) {
        struct array_mapping *mapping = *place;
        if (mapping->array != array) {
            place = &mapping->next;
            continue;
        }
        *place = mapping->next;
        drop_mapping(mapping->allocation);
        free(mapping);
    }
    pthread_mutex_unlock(&lock);
}

FGPU_VIRTUAL_HOOKS(FGPU_EXPORT_GATED_HOOK)
