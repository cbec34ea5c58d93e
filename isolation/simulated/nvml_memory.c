/* The simulated NVML: what is used of a device, by whom, and r615's limits on that. */
#include "nvml.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SECOND UINT64_C(1000000000)

/* A GPU's figures are its own and those of its MIG instances. */
static bool belongs(const struct machine_device *part, const struct machine_device *device)
{
    return part == device || (part->parent >= 0 && &nvml_machine()->devices[part->parent] == device);
}

static uint64_t used(const struct machine_device *device)
{
    const struct machine *machine = nvml_machine();
    uint64_t sum = 0;
    for (unsigned i = 0; i < machine->count; i++)
        if (belongs(&machine->devices[i], device))
            sum += ledger_used(&machine->devices[i]);
    return sum;
}

/* What the caller is told of a device: all of it, or its own cgroup's limit. */
static void told(const struct machine_device *device, uint64_t *total, uint64_t *taken)
{
    uint64_t chain[LEDGER_CGROUPS];
    cgroup_chain(chain);
    const uint64_t limit = cgroup_limit(device, chain[0]);
    const bool limited = limit < device->memory_bytes;
    *total = limited ? limit : device->memory_bytes;
    *taken = limited ? cgroup_used(device, chain[0]) : used(device);
    if (*taken > *total)
        *taken = *total;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    /* The driver's documents promise the limit for the second version only. */
    out->total = device->memory_bytes;
    out->used = used(device);
    out->free = out->total - out->used;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uint64_t total, taken;
    told(device, &total, &taken);
    out->total = total;
    out->reserved = 0;
    out->used = taken;
    out->free = total - taken;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, nvmlBAR1Memory_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_ERROR_NOT_SUPPORTED;
}

/* ---- processes ------------------------------------------------------------------------------------------ */

struct holder {
    unsigned pid, instance;
    unsigned slot, block;
    uint64_t bytes;
};

/* Every live process with a context on the device that the caller's PID namespace has a number for, as of today's
 * drivers. Returns how many there are; `*out` is the caller's to free. */
static unsigned holders(const struct machine_device *device, struct holder **out)
{
    const struct machine *machine = nvml_machine();
    struct ledger *ledger = ledger_mapped();
    const unsigned slots = atomic_load(&ledger->header.watermark);
    unsigned count = 0;
    *out = calloc(slots ? slots : 1, MACHINE_INSTANCES * sizeof **out);
    for (unsigned slot = 0; *out && slot < slots; slot++)
        for (unsigned i = 0; i < machine->count; i++) {
            const struct machine_device *part = &machine->devices[i];
            const struct ledger_holding *holding = &ledger->slots[slot].holdings[part->block];
            if (!belongs(part, device) || ledger_is_checkpointed(&ledger->slots[slot]))
                continue;
            if (atomic_load(&holding->contexts) == 0 && atomic_load(&holding->bytes) == 0)
                continue;
            const pid_t pid = ledger_owner(slot);
            if (pid > 0)
                (*out)[count++] = (struct holder){.pid = (unsigned)pid,
                                                  .instance = part->parent < 0 ? UINT32_MAX : part->ordinal,
                                                  .slot = slot,
                                                  .block = part->block,
                                                  .bytes = atomic_load(&holding->bytes)};
        }
    return count;
}

/* NVML's protocol for lists: `*count` entries fit; if more are needed, says so and how many. */
#define LIST(handle, count, array, holder, fill)                        \
    do {                                                                \
        DEVICE_OR_RETURN(device, handle);                               \
        if (!(count) || (*(count) && !(array)))                         \
            return NVML_ERROR_INVALID_ARGUMENT;                         \
        struct holder *found;                                           \
        const unsigned there = holders(device, &found), fits = *(count); \
        *(count) = there;                                               \
        for (unsigned i = 0; i < there && there <= fits; i++) {         \
            const struct holder *holder = &found[i];                    \
            fill;                                                       \
        }                                                               \
        free(found);                                                    \
        return there > fits ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS; \
    } while (0)

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned int *count,
                                                              nvmlProcessInfo_v1_t *array)
{
    LIST(handle, count, array, holder, (array[i] = (nvmlProcessInfo_v1_t){holder->pid, holder->bytes}));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, unsigned int *count,
                                                                 nvmlProcessInfo_v2_t *array)
{
    LIST(handle, count, array, holder,
         (array[i] = (nvmlProcessInfo_v2_t){holder->pid, holder->bytes, holder->instance,
                                            holder->instance == UINT32_MAX ? UINT32_MAX : 0}));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, unsigned int *count,
                                                                 nvmlProcessInfo_v2_t *array)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, array);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t handle, nvmlProcessDetailList_v1_t *list)
{
    if (!list)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (list->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlProcessDetail_v1_t *array = list->procArray;
    LIST(handle, &list->numProcArrayEntries, array, holder,
         (array[i] = (nvmlProcessDetail_v1_t){holder->pid, holder->bytes, holder->instance,
                                              holder->instance == UINT32_MAX ? UINT32_MAX : 0, 0}));
}

/* Nothing simulated draws, and there is no MPS. */
#define NOBODY(name, type)                                                                                  \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t handle, unsigned int *count, type *array)                    \
    {                                                                                                       \
        (void)array;                                                                                        \
        DEVICE_OR_RETURN(device, handle);                                                                   \
        if (!count)                                                                                         \
            return NVML_ERROR_INVALID_ARGUMENT;                                                             \
        *count = 0;                                                                                         \
        return NVML_SUCCESS;                                                                                \
    }

NOBODY(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_v2_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_v2_t)

/* ---- utilisation ---------------------------------------------------------------------------------------- */

static unsigned percent(uint64_t busy_ns)
{
    return busy_ns >= SECOND ? 100 : (unsigned)(busy_ns * 100 / SECOND);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    const struct machine *machine = nvml_machine();
    struct ledger *ledger = ledger_mapped();
    const unsigned slots = atomic_load(&ledger->header.watermark);
    const uint64_t now = machine_now();
    uint64_t busy = 0;
    for (unsigned i = 0; i < machine->count; i++)
        for (unsigned slot = 0; belongs(&machine->devices[i], device) && slot < slots; slot++)
            busy += ledger_busy_in(&ledger->slots[slot], machine->devices[i].block, now, SECOND);
    *out = (nvmlUtilization_t){.gpu = percent(busy)};
    return NVML_SUCCESS;
}

static unsigned busy_percent(const struct holder *holder)
{
    return percent(ledger_busy_in(&ledger_mapped()->slots[holder->slot], holder->block, machine_now(), SECOND));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle, nvmlProcessUtilizationSample_t *array,
                                                         unsigned int *count, unsigned long long since)
{
    (void)since; /* There is one sample of each: the last second. */
    LIST(handle, count, array, holder,
         (array[i] = (nvmlProcessUtilizationSample_t){
              .pid = holder->pid, .timeStamp = machine_now() / 1000, .smUtil = busy_percent(holder)}));
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t handle,
                                                               nvmlProcessesUtilizationInfo_v1_t *list)
{
    if (!list)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (list->version != nvmlProcessesUtilizationInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlProcessUtilizationInfo_v1_t *array = list->procUtilArray;
    LIST(handle, &list->processSamplesCount, array, holder,
         (array[i] = (nvmlProcessUtilizationInfo_v1_t){
              .pid = holder->pid, .timeStamp = machine_now() / 1000, .smUtil = busy_percent(holder)}));
}

/* ---- r615: memory limits of cgroups ----------------------------------------------------------------------- */

static nvmlReturn_t limits_supported(const struct machine_device *device)
{
    return nvml_machine()->driver_major >= 615 && device->parent < 0 && device->instances == 0
               ? NVML_SUCCESS
               : NVML_ERROR_NOT_SUPPORTED;
}

static struct ledger_limit *limit_of(uint64_t cgroup, bool make, const char *path)
{
    struct ledger *ledger = ledger_mapped();
    for (unsigned i = 0; i < LEDGER_LIMITS; i++)
        if (atomic_load(&ledger->limits[i].cgroup) == cgroup)
            return &ledger->limits[i];
    for (unsigned i = 0; make && i < LEDGER_LIMITS; i++)
        if (atomic_load(&ledger->limits[i].cgroup) == 0) {
            struct ledger_limit *limit = &ledger->limits[i];
            for (unsigned block = 0; block < MACHINE_DEVICES; block++) {
                atomic_store(&limit->devices[block].soft, 0);
                atomic_store(&limit->devices[block].hard, LEDGER_NO_LIMIT);
            }
            strncpy(limit->path, path, sizeof limit->path - 1);
            atomic_store(&limit->cgroup, cgroup);
            return limit;
        }
    return NULL;
}

/* Such an entry is as good as none. */
static bool unlimited(struct ledger_limit *limit)
{
    for (unsigned block = 0; block < MACHINE_DEVICES; block++)
        if (atomic_load(&limit->devices[block].soft) != 0 ||
            atomic_load(&limit->devices[block].hard) != LEDGER_NO_LIMIT)
            return false;
    return true;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t handle, const nvmlSetMemoryLimits_v1_t *limits)
{
    DEVICE_OR_RETURN(device, handle);
    nvmlReturn_t supported = limits_supported(device);
    if (supported != NVML_SUCCESS)
        return supported;
    if (!limits || !limits->nameSpace || limits->softLimit > limits->hardLimit)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    const uint64_t cgroup = cgroup_inode(limits->nameSpace);
    if (!cgroup)
        return NVML_ERROR_NOT_FOUND;
    /* The byte lock is the process's, not the thread's. */
    static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&threads);
    ledger_lock_byte(LEDGER_LOCK_LIMITS, true);
    struct ledger_limit *limit = limit_of(cgroup, true, limits->nameSpace);
    if (limit) {
        atomic_store(&limit->devices[device->block].soft, limits->softLimit);
        atomic_store(&limit->devices[device->block].hard, limits->hardLimit);
        if (unlimited(limit))
            atomic_store(&limit->cgroup, 0);
        atomic_fetch_add(&ledger_mapped()->header.limits_generation, 1);
    }
    ledger_unlock_byte(LEDGER_LOCK_LIMITS);
    pthread_mutex_unlock(&threads);
    return limit ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t handle, nvmlGetMemoryLimits_v1_t *limits)
{
    DEVICE_OR_RETURN(device, handle);
    nvmlReturn_t supported = limits_supported(device);
    if (supported != NVML_SUCCESS)
        return supported;
    if (!limits || !limits->nameSpace)
        return NVML_ERROR_INVALID_ARGUMENT;
    const uint64_t cgroup = cgroup_inode(limits->nameSpace);
    const struct ledger_limit *limit = cgroup ? limit_of(cgroup, false, NULL) : NULL;
    if (!cgroup)
        return NVML_ERROR_NOT_FOUND;
    limits->softLimit = limit ? atomic_load(&limit->devices[device->block].soft) : 0;
    limits->hardLimit = limit ? atomic_load(&limit->devices[device->block].hard) : LEDGER_NO_LIMIT;
    limits->currentUsed = cgroup_used(device, cgroup);
    return NVML_SUCCESS;
}
