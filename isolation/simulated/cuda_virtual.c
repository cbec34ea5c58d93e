/* Virtual memory management: physical memory is a part of a file that exists in memory only, so that it can be mapped
 * in several places at once. It is the device's until its last handle and its last mapping are gone. */
#include "cuda_driver.h"

#include <fcntl.h>
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GRANULARITY (UINT64_C(2) << 20)
#define ARENA_BYTES (INT64_C(1) << 50)
#define MFD_CLOEXEC_FLAG 1u

struct physical {
    struct device *device;
    size_t bytes;
    unsigned handles, mappings;
    int64_t offset; /* in the arena */
};

struct reservation {
    CUdeviceptr start;
    size_t bytes;
    struct reservation *next;
};

static struct reservation *reservations;
static int arena = -1;
static int64_t arena_end;

static bool arena_made(void)
{
    if (arena < 0)
        arena = (int)syscall(SYS_memfd_create, "simulated device memory", MFD_CLOEXEC_FLAG);
    return arena >= 0 && ftruncate(arena, ARENA_BYTES) == 0;
}

static void *all; /* a tree of those that there are: a handle may be of one that is gone */

static int by_place(const void *left, const void *right)
{
    return left < right ? -1 : left > right;
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    return tfind(physical, &all, by_place) && physical->handles ? physical : NULL;
}

static bool publish(struct physical *physical, CUmemGenericAllocationHandle *out)
{
    *out = (uintptr_t)physical;
    return tsearch(physical, &all, by_place) != NULL;
}

static void drop(struct physical *physical)
{
    if (physical->handles || physical->mappings)
        return;
    ledger_give(physical->device->machine, physical->bytes);
    fallocate(arena, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, physical->offset, (off_t)physical->bytes);
    tdelete(physical, &all, by_place);
    free(physical);
}

/* For sparse arrays, which name their memory the same way (cuda_array.c). */
bool physical_map(CUmemGenericAllocationHandle handle, void **out)
{
    struct physical *physical = physical_of(handle);
    if (!physical)
        return false;
    physical->mappings++;
    *out = physical;
    return true;
}

void physical_unmap(void *mapped)
{
    struct physical *physical = mapped;
    physical->mappings--;
    drop(physical);
}

CALL(cuMemCreate, 10020, cuMemCreate, CUmemGenericAllocationHandle *out, size_t bytes,
     const CUmemAllocationProp *properties, unsigned long long flags)
{
    READY();
    if (!out || !bytes || bytes % GRANULARITY || !properties || flags ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->requestedHandleTypes)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct device *device = device_of(properties->location.id);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    SAFE();
    LOCKED;
    if (!arena_made())
        return CUDA_ERROR_OPERATING_SYSTEM;
    struct physical *physical = calloc(1, sizeof *physical);
    if (!physical || !ledger_take(device->machine, bytes)) {
        free(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *physical = (struct physical){device, bytes, 1, 0, arena_end};
    arena_end += (int64_t)bytes;
    return publish(physical, out) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define PHYSICAL_OF(variable, handle) \
    READY(); \
    LOCKED; \
    struct physical *variable = physical_of(handle); \
    if (!variable) \
    return CUDA_ERROR_INVALID_VALUE

CALL(cuMemRelease, 10020, cuMemRelease, CUmemGenericAllocationHandle handle)
{
    PHYSICAL_OF(physical, handle);
    physical->handles--;
    drop(physical);
    return CUDA_SUCCESS;
}

CALL(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *out, void *address)
{
    READY();
    LOCKED;
    struct range *range = range_at((uintptr_t)address);
    if (!out || !range || range->kind != MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    struct physical *physical = range->object;
    physical->handles++;
    *out = (uintptr_t)physical;
    return CUDA_SUCCESS;
}

/* ---- addresses --------------------------------------------------------------------------------------------------- */

static CUresult reserve(CUdeviceptr *out, size_t bytes, size_t alignment)
{
    size_t whole = bytes + alignment;
    struct reservation *reservation = calloc(1, sizeof *reservation);
    void *address = reservation && whole > bytes
                        ? mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                        : MAP_FAILED;
    if (address == MAP_FAILED) {
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uintptr_t from = (uintptr_t)address, start = (from + alignment - 1) / alignment * alignment;
    if (start > from)
        munmap(address, start - from);
    munmap((void *)(start + bytes), from + whole - start - bytes);
    *reservation = (struct reservation){start, bytes, reservations};
    reservations = reservation;
    *out = start;
    return CUDA_SUCCESS;
}

CALL(cuMemAddressReserve, 10020, cuMemAddressReserve, CUdeviceptr *out, size_t bytes, size_t alignment,
     CUdeviceptr wish, unsigned long long flags)
{
    (void)wish;
    READY();
    if (!out || !bytes || bytes % GRANULARITY || alignment & (alignment - 1) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    return reserve(out, bytes, alignment > GRANULARITY ? alignment : GRANULARITY);
}

static struct reservation **reservation_of(CUdeviceptr start, size_t bytes)
{
    struct reservation **place = &reservations;
    while (*place && (start < (*place)->start || start + bytes > (*place)->start + (*place)->bytes))
        place = &(*place)->next;
    return place;
}

static bool mapped_within(const struct range *range, void *of)
{
    const struct reservation *span = of;
    return range->kind == MAPPED && range->start >= span->start && range->start < span->start + span->bytes;
}

static unsigned counted;

static void count(struct range *range)
{
    (void)range;
    counted++;
}

CALL(cuMemAddressFree, 10020, cuMemAddressFree, CUdeviceptr start, size_t bytes)
{
    READY();
    LOCKED;
    struct reservation **place = reservation_of(start, bytes), *found = *place;
    if (!found || found->start != start || found->bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    counted = 0;
    range_each(mapped_within, found, count);
    if (counted)
        return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)(uintptr_t)start, bytes);
    *place = found->next;
    free(found);
    return CUDA_SUCCESS;
}

/* ---- mappings ------------------------------------------------------------------------------------------------------ */

CALL(cuMemMap, 10020, cuMemMap, CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
     unsigned long long flags)
{
    PHYSICAL_OF(physical, handle);
    if (offset || flags || !bytes || bytes % GRANULARITY || bytes > physical->bytes || start % GRANULARITY ||
        !*reservation_of(start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    struct range *range = range_add(start, bytes, MAPPED, NULL);
    if (!range)
        return CUDA_ERROR_INVALID_VALUE;
    void *address = (void *)(uintptr_t)start;
    if (mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, arena, physical->offset) == MAP_FAILED) {
        range_remove(range);
        return CUDA_ERROR_MAP_FAILED;
    }
    range->device = physical->device;
    range->object = physical;
    range->inaccessible = true;
    physical->mappings++;
    return CUDA_SUCCESS;
}

/* Whole mappings that lie side by side, first to last. */
static bool whole_mappings(CUdeviceptr start, size_t bytes)
{
    CUdeviceptr at = start;
    while (at < start + bytes) {
        struct range *range = range_at(at);
        if (!range || range->kind != MAPPED || range->start != at || at + range->bytes > start + bytes)
            return false;
        at += range->bytes;
    }
    return bytes != 0;
}

CALL(cuMemUnmap, 10020, cuMemUnmap, CUdeviceptr start, size_t bytes)
{
    READY();
    LOCKED;
    if (!whole_mappings(start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = start; at < start + bytes;) {
        struct range *range = range_at(at);
        struct physical *physical = range->object;
        mmap((void *)(uintptr_t)at, range->bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        at += range->bytes;
        range_remove(range);
        physical_unmap(physical);
    }
    return CUDA_SUCCESS;
}

CALL(cuMemSetAccess, 10020, cuMemSetAccess, CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access,
     size_t entries)
{
    READY();
    LOCKED;
    if (!access || !entries || !whole_mappings(start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = start; at < start + bytes;) {
        struct range *range = range_at(at);
        for (size_t i = 0; i < entries; i++) {
            if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                access[i].location.id != range->device->ordinal)
                continue;
            int right = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                        : access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                              : PROT_NONE;
            mprotect((void *)(uintptr_t)at, range->bytes, right);
            range->inaccessible = right == PROT_NONE;
            range->flags = access[i].flags;
        }
        at += range->bytes;
    }
    return CUDA_SUCCESS;
}

/* It stays the memory of who made it. */
/* ---- asking -------------------------------------------------------------------------------------------------------------- */

CALL(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity, size_t *out,
     const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option)
{
    (void)option;
    READY();
    if (!out || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}
