/* Plain, pitched, managed and host memory. Device memory is host memory that is not there until it is touched. */
#include "cuda_driver.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define LOW_STEP (UINT64_C(64) << 20)
#define PITCH 512

static void *ranges; /* a tree of struct range, by address */
static _Atomic(unsigned long long) next_id = 1;

/* Ranges that overlap are equal, so an address finds what it lies in. */
static int by_address(const void *left, const void *right)
{
    const struct range *a = left, *b = right;
    return a->start + a->bytes <= b->start ? -1 : b->start + b->bytes <= a->start ? 1 : 0;
}

struct range *range_at(CUdeviceptr address)
{
    struct range key = {.start = address, .bytes = 1};
    struct range **found = tfind(&key, &ranges, by_address);
    return found ? *found : NULL;
}

struct range *range_add(CUdeviceptr start, size_t bytes, enum kind kind, CUcontext context)
{
    struct range *range = calloc(1, sizeof *range);
    if (!range)
        return NULL;
    *range = (struct range){.start = start, .bytes = bytes, .kind = kind, .context = context, .id = next_id++};
    range->device = context ? context->device : NULL;
    struct range **place = tsearch(range, &ranges, by_address);
    if (!place || *place != range) {
        free(range);
        return NULL;
    }
    return range;
}

void range_remove(struct range *range)
{
    tdelete(range, &ranges, by_address);
    free(range);
}

static struct {
    struct range **found;
    size_t count, room;
    bool (*chosen)(const struct range *, void *);
    void *context;
} walk;

static void visit(const void *node, VISIT visited, int level)
{
    (void)level;
    struct range *range = *(struct range *const *)node;
    if ((visited != postorder && visited != leaf) || !walk.chosen(range, walk.context))
        return;
    if (walk.count == walk.room) {
        walk.room = walk.room ? walk.room * 2 : 64;
        struct range **more = realloc(walk.found, walk.room * sizeof *more);
        if (!more)
            return;
        walk.found = more;
    }
    walk.found[walk.count++] = range;
}

/* Gathers first: what is done to them removes them. */
void range_each(bool (*chosen)(const struct range *, void *), void *context, void (*act)(struct range *))
{
    memset(&walk, 0, sizeof walk);
    walk.chosen = chosen;
    walk.context = context;
    twalk(ranges, visit);
    struct range **found = walk.found;
    for (size_t i = 0; i < walk.count; i++)
        act(found[i]);
    free(found);
}

static size_t pages(size_t bytes)
{
    return (bytes + 4095) & ~(size_t)4095;
}

CUdeviceptr addresses_reserve(size_t bytes, bool low)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (pages(bytes) < bytes)
        return 0;
    if (!low) {
        void *address = mmap(NULL, pages(bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
        return address == MAP_FAILED ? 0 : (CUdeviceptr)(uintptr_t)address;
    }
    /* For the 32-bit addresses of CUDA before 3.2: an address to begin with is only a wish, so look whether it came
     * true. */
    for (uint64_t wish = LOW_STEP; wish + pages(bytes) <= UINT32_MAX; wish += LOW_STEP) {
        void *address = mmap((void *)(uintptr_t)wish, pages(bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
        if (address == MAP_FAILED)
            return 0;
        if ((uintptr_t)address + pages(bytes) <= UINT32_MAX)
            return (CUdeviceptr)(uintptr_t)address;
        munmap(address, pages(bytes));
    }
    return 0;
}

void addresses_release(CUdeviceptr start, size_t bytes)
{
    munmap((void *)(uintptr_t)start, pages(bytes));
}

/* ---- device memory ------------------------------------------------------------------------------------------ */

static uint64_t rounded(uint64_t bytes, uint64_t to)
{
    return to ? (bytes + to - 1) / to * to : bytes;
}

/* Small allocations share blocks of the granularity: all of them together are rounded up. */
CUresult device_take(struct device *device, size_t bytes, size_t *charged)
{
    uint64_t granularity = device->machine->granularity_bytes;
    if (bytes >= granularity) {
        *charged = rounded(bytes, granularity);
        return *charged >= bytes && ledger_take(device->machine, *charged) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t before = rounded(device->small_bytes, granularity);
    uint64_t after = rounded(device->small_bytes + bytes, granularity);
    if (after > before && !ledger_take(device->machine, after - before))
        return CUDA_ERROR_OUT_OF_MEMORY;
    device->small_bytes += bytes;
    *charged = 0;
    return CUDA_SUCCESS;
}

void device_give(struct device *device, size_t bytes, size_t charged)
{
    uint64_t granularity = device->machine->granularity_bytes;
    if (bytes >= granularity) {
        ledger_give(device->machine, charged);
        return;
    }
    uint64_t before = rounded(device->small_bytes, granularity);
    device->small_bytes -= bytes;
    ledger_give(device->machine, before - rounded(device->small_bytes, granularity));
}

static CUresult allocate(size_t bytes, enum kind kind, bool low, CUdeviceptr *out)
{
    CURRENT(context);
    if (!out || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    SAFE();
    size_t charged = 0;
    LOCKED;
    if (kind == PLAIN) {
        CUresult result = device_take(context->device, bytes, &charged);
        if (result)
            return result;
    }
    CUdeviceptr start = addresses_reserve(bytes, low);
    struct range *range = start ? range_add(start, bytes, kind, context) : NULL;
    if (!range) {
        if (start)
            addresses_release(start, bytes);
        if (kind == PLAIN)
            device_give(context->device, bytes, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    range->charged = charged;
    if (kind == MANAGED)
        ledger_count_obstacle(1);
    *out = start;
    return CUDA_SUCCESS;
}

CALL(cuMemAlloc, 3020, cuMemAlloc_v2, CUdeviceptr *out, size_t bytes)
{
    return allocate(bytes, PLAIN, false, out);
}

CALL(cuMemAlloc, 2000, cuMemAlloc, CUdeviceptr_v1 *out, unsigned int bytes)
{
    CUdeviceptr address = 0;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate(bytes, PLAIN, true, &address);
    if (!result)
        *out = (CUdeviceptr_v1)address;
    return result;
}

static CUresult allocate_pitch(size_t *pitch, size_t width, size_t height, unsigned element, bool low, CUdeviceptr *out)
{
    size_t padded = (width + PITCH - 1) & ~(size_t)(PITCH - 1), bytes;
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16) || padded < width ||
        __builtin_mul_overflow(padded, height, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate(bytes, PLAIN, low, out);
    if (!result)
        *pitch = padded;
    return result;
}

CALL(cuMemAllocPitch, 3020, cuMemAllocPitch_v2, CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
     unsigned int element)
{
    return allocate_pitch(pitch, width, height, element, false, out);
}

CALL(cuMemAllocPitch, 2000, cuMemAllocPitch, CUdeviceptr_v1 *out, unsigned int *pitch, unsigned int width,
     unsigned int height, unsigned int element)
{
    CUdeviceptr address = 0;
    size_t padded = 0;
    if (!out || !pitch)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate_pitch(&padded, width, height, element, true, &address);
    if (!result) {
        *out = (CUdeviceptr_v1)address;
        *pitch = (unsigned)padded;
    }
    return result;
}

/* Lives in system memory until a kernel touches it; and simulated ones touch nothing. */
CALL(cuMemAllocManaged, 6000, cuMemAllocManaged, CUdeviceptr *out, size_t bytes, unsigned int flags)
{
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(bytes, MANAGED, false, out);
}

static void free_range(struct range *range)
{
    CUdeviceptr start = range->start;
    size_t bytes = range->bytes;
    enum kind kind = range->kind;
    if (kind == PLAIN)
        device_give(range->device, bytes, range->charged);
    if (kind == MANAGED)
        ledger_count_obstacle(-1);
    range_remove(range);
    if (kind != REGISTERED)
        addresses_release(start, bytes);
}

static bool of_context(const struct range *range, void *context)
{
    return range->context == context && range->kind != POOLED && range->kind != GRAPHED && range->kind != MAPPED;
}

void memory_of_context_free(CUcontext context)
{
    range_each(of_context, context, free_range);
}

CUresult memory_free(CUdeviceptr address)
{
    CURRENT(context);
    if (!address)
        return CUDA_SUCCESS;
    SAFE();
    /* Kernels that are queued may still use it. */
    context_wait(context);
    LOCKED;
    struct range *range = range_at(address);
    if (!range || range->start != address || range->kind == HOST || range->kind == REGISTERED || range->kind == MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    if (range->kind == POOLED)
        pool_free(range);
    else if (range->kind == GRAPHED)
        graph_memory_free(range);
    else
        free_range(range);
    return CUDA_SUCCESS;
}

CALL(cuMemFree, 3020, cuMemFree_v2, CUdeviceptr address)
{
    return memory_free(address);
}

CALL(cuMemFree, 2000, cuMemFree, CUdeviceptr_v1 address)
{
    return memory_free(address);
}

/* ---- asking --------------------------------------------------------------------------------------------------- */

CALL(cuMemGetInfo, 3020, cuMemGetInfo_v2, size_t *free_bytes, size_t *total_bytes)
{
    CURRENT(context);
    uint64_t left = 0, total = 0;
    if (!free_bytes || !total_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    ledger_view(context->device->machine, &left, &total);
    *free_bytes = left;
    *total_bytes = total;
    return CUDA_SUCCESS;
}

CALL(cuMemGetInfo, 2000, cuMemGetInfo, unsigned int *free_bytes, unsigned int *total_bytes)
{
    CURRENT(context);
    uint64_t left = 0, total = 0;
    if (!free_bytes || !total_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    ledger_view(context->device->machine, &left, &total);
    *free_bytes = left > UINT32_MAX ? UINT32_MAX : (unsigned)left;
    *total_bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned)total;
    return CUDA_SUCCESS;
}

static CUresult address_range(CUdeviceptr address, CUdeviceptr *start, size_t *bytes)
{
    CURRENT(context);
    (void)context;
    LOCKED;
    struct range *range = range_at(address);
    if (!range)
        return CUDA_ERROR_NOT_FOUND;
    *start = range->start;
    *bytes = range->bytes;
    return CUDA_SUCCESS;
}

CALL(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2, CUdeviceptr *start, size_t *bytes, CUdeviceptr address)
{
    CUdeviceptr found = 0;
    size_t size = 0;
    CUresult result = address_range(address, &found, &size);
    if (!result && start)
        *start = found;
    if (!result && bytes)
        *bytes = size;
    return result;
}

/* A part of an allocation, or of several mappings side by side. */
bool span_valid(CUdeviceptr address, size_t bytes)
{
    LOCKED;
    for (bool first = true; bytes; first = false) {
        struct range *range = range_at(address);
        if (!range || range->inaccessible || (!first && range->kind != MAPPED))
            return false;
        size_t inside = range->start + range->bytes - address;
        if (inside >= bytes)
            return true;
        address += inside;
        bytes -= inside;
    }
    return true;
}

/* ---- host memory ------------------------------------------------------------------------------------------------ */

static CUresult allocate_host(void **out, size_t bytes, unsigned flags)
{
    CUdeviceptr address = 0;
    if (!out || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate(bytes, HOST, false, &address);
    if (result)
        return result;
    LOCKED;
    range_at(address)->flags = flags;
    *out = (void *)(uintptr_t)address;
    return CUDA_SUCCESS;
}

CALL(cuMemAllocHost, 3020, cuMemAllocHost_v2, void **out, size_t bytes)
{
    return allocate_host(out, bytes, CU_MEMHOSTALLOC_DEVICEMAP);
}

CALL(cuMemHostAlloc, 2020, cuMemHostAlloc, void **out, size_t bytes, unsigned int flags)
{
    return allocate_host(out, bytes, flags);
}

static CUresult drop_host(void *address, enum kind kind, CUresult otherwise)
{
    CURRENT(context);
    (void)context;
    LOCKED;
    struct range *range = range_at((uintptr_t)address);
    if (!range || range->start != (uintptr_t)address || range->kind != kind)
        return otherwise;
    free_range(range);
    return CUDA_SUCCESS;
}

CALL(cuMemFreeHost, 2000, cuMemFreeHost, void *address)
{
    return drop_host(address, HOST, CUDA_ERROR_INVALID_VALUE);
}

static CUresult host_register(void *address, size_t bytes, unsigned flags)
{
    CURRENT(context);
    if (!address || !bytes || flags & ~15u)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    struct range *range = range_add((uintptr_t)address, bytes, REGISTERED, context);
    if (!range)
        return (CUresult)712; /* CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED */
    range->flags = flags;
    return CUDA_SUCCESS;
}

CALL(cuMemHostRegister, 6050, cuMemHostRegister_v2, void *address, size_t bytes, unsigned int flags)
{
    return host_register(address, bytes, flags);
}

CALL(cuMemHostUnregister, 4000, cuMemHostUnregister, void *address)
{
    return drop_host(address, REGISTERED, (CUresult)713); /* CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED */
}

CALL(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2, CUdeviceptr *out, void *address, unsigned int flags)
{
    CURRENT(context);
    (void)context;
    LOCKED;
    if (!out || flags || !range_at((uintptr_t)address))
        return CUDA_ERROR_INVALID_VALUE;
    *out = (uintptr_t)address;
    return CUDA_SUCCESS;
}

/* ---- attributes of pointers --------------------------------------------------------------------------------------- */

static CUresult attribute_of(const struct range *range, CUdeviceptr address, int attribute, void *out)
{
    bool host = range->kind == HOST || range->kind == REGISTERED;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)out = range->context;
        return range->context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)out = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(void **)out = (void *)(uintptr_t)address;
        return host || range->kind == MANAGED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)out = range->sync_memops;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)out = range->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)out = range->kind == MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = range->device ? range->device->ordinal : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)out = range->start;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = range->bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)out = 1;
        return CUDA_SUCCESS;
    case 10: /* IS_LEGACY_CUDA_IPC_CAPABLE */
        *(unsigned *)out = range->kind == PLAIN;
        return CUDA_SUCCESS;
    case 14: /* ALLOWED_HANDLE_TYPES */
        *(cuuint64_t *)out = 0;
        return CUDA_SUCCESS;
    case 15: /* IS_GPU_DIRECT_RDMA_CAPABLE */
    case 18: /* MAPPING_SIZE, as the whole is mapped at once */
        *(cuuint64_t *)out = attribute == 18 ? range->bytes : 0;
        return CUDA_SUCCESS;
    case 16: /* ACCESS_FLAGS */
        *(unsigned *)out = 3;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)out = range->pool;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CALL(cuPointerGetAttribute, 4000, cuPointerGetAttribute, void *out, CUpointer_attribute attribute, CUdeviceptr address)
{
    READY();
    LOCKED;
    struct range *range = range_at(address);
    return out && range ? attribute_of(range, address, (int)attribute, out) : CUDA_ERROR_INVALID_VALUE;
}
