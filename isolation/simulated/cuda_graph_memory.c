/* The memory that graphs allocate. Each device has a store of it: taken at the first launch that needs it, kept when
 * the graph has freed it, given back by a trim. */
#include "cuda_driver.h"

#include <stdlib.h>

#define UNIT (UINT64_C(2) << 20)

struct graph_memory {
    struct device *device;
    CUdeviceptr start;
    size_t bytes;
    unsigned users; /* nodes, and 1 while it is allocated */
    bool live;
    struct graph_memory *next;
};

static struct graph_memory *all;

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + UNIT - 1) / UNIT * UNIT;
}

/* The address is fixed from the start, the memory is not there before the launch. */
CUresult graph_memory_create(struct device *device, size_t bytes, struct graph_memory **out, CUdeviceptr *address)
{
    struct graph_memory *memory = calloc(1, sizeof *memory);
    CUdeviceptr start = memory ? addresses_reserve(bytes, false) : 0;
    if (!start) {
        free(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *memory = (struct graph_memory){device, start, bytes, 1, false, all};
    all = memory;
    *out = memory;
    *address = start;
    return CUDA_SUCCESS;
}

struct graph_memory *graph_memory_share(struct graph_memory *memory)
{
    memory->users++;
    return memory;
}

void graph_memory_drop(struct graph_memory *memory)
{
    if (--memory->users)
        return;
    for (struct graph_memory **place = &all; *place; place = &(*place)->next)
        if (*place == memory) {
            *place = memory->next;
            break;
        }
    addresses_release(memory->start, memory->bytes);
    free(memory);
}

bool graph_memory_live(const struct graph_memory *memory)
{
    return memory->live;
}

size_t graph_memory_bytes(const struct graph_memory *memory)
{
    return memory->bytes;
}

struct device *graph_memory_device(const struct graph_memory *memory)
{
    return memory->device;
}

struct graph_memory *graph_memory_at(CUdeviceptr address)
{
    struct graph_memory *memory = all;
    while (memory && memory->start != address)
        memory = memory->next;
    return memory;
}

CUresult graph_memory_reserve(struct device *device, uint64_t bytes)
{
    if (bytes <= device->graph_reserved)
        return CUDA_SUCCESS;
    uint64_t more = rounded(bytes) - device->graph_reserved;
    if (!ledger_take(device->machine, more))
        return CUDA_ERROR_OUT_OF_MEMORY;
    device->graph_reserved += more;
    if (device->graph_reserved > device->graph_reserved_high)
        device->graph_reserved_high = device->graph_reserved;
    return CUDA_SUCCESS;
}

CUresult graph_memory_use(struct graph_memory *memory)
{
    struct device *device = memory->device;
    CUresult result = graph_memory_reserve(device, device->graph_used + memory->bytes);
    struct range *range = result ? NULL : range_add(memory->start, memory->bytes, GRAPHED, NULL);
    if (!range)
        return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
    range->device = device;
    range->object = memory;
    memory->live = true;
    memory->users++;
    device->graph_used += memory->bytes;
    if (device->graph_used > device->graph_used_high)
        device->graph_used_high = device->graph_used;
    return CUDA_SUCCESS;
}

void graph_memory_unuse(struct graph_memory *memory)
{
    if (!memory->live)
        return;
    range_remove(range_at(memory->start));
    memory->live = false;
    memory->device->graph_used -= memory->bytes;
    graph_memory_drop(memory);
}

/* By the program, outside of the graph. */
void graph_memory_free(struct range *range)
{
    graph_memory_unuse(range->object);
}

static void trim(struct device *device)
{
    uint64_t keep = rounded(device->graph_used);
    if (device->graph_reserved <= keep)
        return;
    ledger_give(device->machine, device->graph_reserved - keep);
    device->graph_reserved = keep;
}

static bool of_device(const struct range *range, void *device)
{
    return range->kind == GRAPHED && range->device == device;
}

void graph_memory_reset(struct device *device)
{
    range_each(of_device, device, graph_memory_free);
    trim(device);
}

#define DEVICE(variable, ordinal) \
    READY(); \
    LOCKED; \
    struct device *variable = device_of(ordinal); \
    if (!variable) \
    return CUDA_ERROR_INVALID_DEVICE

CALL(cuDeviceGraphMemTrim, 11040, cuDeviceGraphMemTrim, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    trim(device);
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetGraphMemAttribute, 11040, cuDeviceGetGraphMemAttribute, CUdevice ordinal,
     CUgraphMem_attribute attribute, void *value)
{
    DEVICE(device, ordinal);
    const uint64_t values[] = {device->graph_used, device->graph_used_high, device->graph_reserved,
                               device->graph_reserved_high};
    if (!value || (unsigned)attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    *(cuuint64_t *)value = values[attribute];
    return CUDA_SUCCESS;
}
