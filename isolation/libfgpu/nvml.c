/* What NVML reports of memory and processes. A session sees its limit as the device's total, the session's sum as used,
 * and only its own processes. Devices outside its limits are hidden. */
#include "parts.h"

#include <stdlib.h>
#include <string.h>

#define NO_INSTANCE UINT32_MAX /* of a device that is not partitioned */

static int device_of(nvmlDevice_t device) {
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    __typeof__(&nvmlDeviceGetUUID) get = DRIVER(nvmlDeviceGetUUID);
    return get != NULL && get(device, uuid, sizeof uuid) == NVML_SUCCESS ? fgpu_device_by_uuid(uuid) : FGPU_UNNAMED;
}

/* ---- Which devices there are ---- */

/* The session's devices as NVML counts them, in the order of the limits, with what NVML says of each. An instance
 * counts as the GPU of which it is a part, and each GPU once. 0 if the limits cannot be read. */
struct own {
    nvmlDevice_t handle;
    nvmlReturn_t result;
};

static unsigned int own_devices(struct own *own) {
    const struct fgpu_limits *limits = fgpu_limits();
    unsigned int count = 0, n;
    for (unsigned i = 0; limits != NULL && i < limits->device_count; i++) {
        const char *uuid = limits->devices[i].uuid;
        nvmlDevice_t handle = NULL;
        __typeof__(&nvmlDeviceGetHandleByUUID) find = DRIVER(nvmlDeviceGetHandleByUUID);
        __typeof__(&nvmlDeviceGetDeviceHandleFromMigDeviceHandle) whole =
            DRIVER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
        nvmlReturn_t result = find == NULL ? NVML_ERROR_FUNCTION_NOT_FOUND : find(uuid, &handle);
        if (result == NVML_SUCCESS && strncmp(uuid, "MIG-", 4) == 0)
            result = whole == NULL ? NVML_ERROR_FUNCTION_NOT_FOUND : whole(handle, &handle);
        for (n = 0; n < count && (result != NVML_SUCCESS || own[n].handle != handle); n++) {
        }
        if (n == count)
            own[count++] = (struct own){result == NVML_SUCCESS ? handle : NULL, result};
    }
    return count;
}

static nvmlReturn_t count_own(nvmlReturn_t result, unsigned int *count) {
    struct own own[FGPU_MAX_DEVICES];
    if (result == NVML_SUCCESS && (*count = own_devices(own)) == 0)
        return NVML_ERROR_NO_PERMISSION;
    return result;
}

static nvmlReturn_t own_at(unsigned int index, nvmlDevice_t *device) {
    struct own own[FGPU_MAX_DEVICES];
    unsigned int count = own_devices(own);
    if (count == 0)
        return NVML_ERROR_NO_PERMISSION;
    if (device == NULL || index >= count)
        return own[0].result == NVML_ERROR_UNINITIALIZED ? own[0].result : NVML_ERROR_INVALID_ARGUMENT;
    *device = own[index].handle;
    return own[index].result;
}

static nvmlReturn_t index_of(nvmlReturn_t result, nvmlDevice_t device, unsigned int *index) {
    struct own own[FGPU_MAX_DEVICES];
    unsigned int count = result == NVML_SUCCESS ? own_devices(own) : 0;
    for (unsigned int n = 0; n < count; n++)
        if (own[n].handle == device) {
            *index = n;
            return NVML_SUCCESS;
        }
    return result == NVML_SUCCESS && device_of(device) < 0 ? NVML_ERROR_NO_PERMISSION : result; /* an instance stays */
}

/* Other sessions' devices are not found, however they are named. */
static nvmlReturn_t only_own(nvmlReturn_t result, nvmlDevice_t *device) {
    unsigned int index = 0;
    if (result != NVML_SUCCESS || index_of(NVML_SUCCESS, *device, &index) == NVML_SUCCESS)
        return result;
    *device = NULL;
    return NVML_ERROR_NOT_FOUND;
}

/* ---- Memory ---- */

/* The three numbers always add up: memory that a neighbour takes above its share is not shown. */
static nvmlReturn_t slice_of(nvmlDevice_t handle, unsigned long long *total, unsigned long long *unused,
                             unsigned long long *used) {
    int device = device_of(handle);
    uint64_t limit = device < 0 ? 0 : fgpu_visible_total(device, *total);
    if (limit == 0) {
        *total = *unused = *used = 0;
        return NVML_ERROR_NO_PERMISSION;
    }
    fgpu_settle(device);
    uint64_t held = fgpu_used(device);
    *total = limit;
    *used = held < limit ? held : limit;
    *unused = limit - *used;
    return NVML_SUCCESS;
}

static nvmlReturn_t memory_info(__typeof__(&nvmlDeviceGetMemoryInfo) real, nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = real(device, memory);
    return result == NVML_SUCCESS ? slice_of(device, &memory->total, &memory->free, &memory->used) : result;
}

/* Memory that the driver keeps to itself is not part of the slice. */
static nvmlReturn_t memory_info_v2(__typeof__(&nvmlDeviceGetMemoryInfo_v2) real, nvmlDevice_t device,
                                   nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = real(device, memory);
    if (result != NVML_SUCCESS)
        return result;
    memory->reserved = 0;
    return slice_of(device, &memory->total, &memory->free, &memory->used);
}

/* ---- Lists of processes ---- */

/* In a container, NVML knows processes by other numbers than the session does, or not at all. So the list comes from
 * what the session's processes have recorded: those with a number in this namespace, and what each holds of the device.
 * Graphics and MPS processes are not known, so none are listed. */

enum kind { COMPUTE, OTHER };

#define MORE 16 /* processes that may start between two calls */

/* The processes that hold memory of the device; in a session with one device, all with a context. NULL if there are
 * none, or, with `*result`, no memory for the list. */
static struct fgpu_process *processes_on(int device, unsigned int *count, nvmlReturn_t *result) {
    unsigned int room = fgpu_processes(device, NULL, 0) + MORE, used = 0;
    struct fgpu_process *processes = calloc(room, sizeof *processes);
    *result = processes == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
    unsigned int all = processes == NULL ? 0 : fgpu_processes(device, processes, room);
    for (unsigned int i = 0; i < all && i < room; i++)
        if (processes[i].bytes > 0 || fgpu_limits()->device_count == 1)
            processes[used++] = processes[i];
    *count = used;
    return processes;
}

/* Writes an entry of a list. */
typedef void (*writer)(void *entries, unsigned int index, const struct fgpu_process *process);

/* NVML's protocol: if the given list is too short, even an empty one, the call returns the number needed. */
static nvmlReturn_t list(nvmlDevice_t handle, enum kind kind, unsigned int *count, void *entries, writer write) {
    int device = device_of(handle);
    if (device < 0)
        return NVML_ERROR_NO_PERMISSION;
    unsigned int found = 0, room = entries == NULL ? 0 : *count;
    nvmlReturn_t result = NVML_SUCCESS;
    struct fgpu_process *processes = kind == COMPUTE ? processes_on(device, &found, &result) : NULL;
    if (result == NVML_SUCCESS)
        *count = found;
    if (found > room)
        result = NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; result == NVML_SUCCESS && i < found; i++)
        write(entries, i, &processes[i]);
    free(processes);
    return result;
}

/* The driver is asked too, for the number, so that its own errors are reported. */
static bool answers(nvmlReturn_t result) {
    return result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE;
}

static void write_v1(void *entries, unsigned int index, const struct fgpu_process *process) {
    ((nvmlProcessInfo_v1_t *)entries)[index] = (nvmlProcessInfo_v1_t){process->pid, process->bytes};
}

static nvmlReturn_t list_v1(__typeof__(&nvmlDeviceGetComputeRunningProcesses) real, nvmlDevice_t device,
                            enum kind kind, unsigned int *count, nvmlProcessInfo_v1_t *processes) {
    unsigned int all = 0;
    nvmlReturn_t result = real(device, count == NULL ? NULL : &all, NULL);
    return answers(result) && count != NULL ? list(device, kind, count, processes, write_v1) : result;
}

static void write_v2(void *entries, unsigned int index, const struct fgpu_process *process) {
    ((nvmlProcessInfo_v2_t *)entries)[index] =
        (nvmlProcessInfo_v2_t){process->pid, process->bytes, NO_INSTANCE, NO_INSTANCE};
}

static nvmlReturn_t list_v2(__typeof__(&nvmlDeviceGetComputeRunningProcesses_v2) real, nvmlDevice_t device,
                            enum kind kind, unsigned int *count, nvmlProcessInfo_v2_t *processes) {
    unsigned int all = 0;
    nvmlReturn_t result = real(device, count == NULL ? NULL : &all, NULL);
    return answers(result) && count != NULL ? list(device, kind, count, processes, write_v2) : result;
}

static void write_detail(void *entries, unsigned int index, const struct fgpu_process *process) {
    ((nvmlProcessDetail_v1_t *)entries)[index] = (nvmlProcessDetail_v1_t){
        process->pid, process->bytes, NO_INSTANCE, NO_INSTANCE, 0};
}

static nvmlReturn_t detail_list(__typeof__(&nvmlDeviceGetRunningProcessDetailList) real, nvmlDevice_t device,
                                nvmlProcessDetailList_v1_t *details) {
    if (details == NULL)
        return real(device, details);
    if (details->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlProcessDetailList_v1_t all = {details->version, details->mode, 0, NULL};
    nvmlReturn_t result = real(device, &all);
    enum kind kind = details->mode == NVML_PROCESS_MODE_COMPUTE || details->mode == NVML_PROCESS_MODE_ALL ? COMPUTE
                                                                                                          : OTHER;
    return answers(result) ? list(device, kind, &details->numProcArrayEntries, details->procArray, write_detail)
                           : result;
}

/* ---- Samples of processes ---- */

/* Moves the entries of the session's own processes to the front. Each entry has its pid at `pid_at`. */
static unsigned int keep_ours(void *entries, unsigned int count, size_t size, size_t pid_at) {
    char *from = entries, *to = entries;
    for (unsigned int i = 0; i < count; i++, from += size) {
        unsigned int pid;
        memcpy(&pid, from + pid_at, sizeof pid);
        if (!fgpu_is_ours(pid))
            continue;
        if (to != from)
            memmove(to, from, size);
        to += size;
    }
    return (unsigned int)((size_t)(to - (char *)entries) / size);
}

/* Here the first call returns how many there may be, the second how many there are. */
static nvmlReturn_t utilization(__typeof__(&nvmlDeviceGetProcessUtilization) real, nvmlDevice_t device,
                                nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                unsigned long long since) {
    nvmlReturn_t result = real(device, samples, count, since);
    if (result != NVML_SUCCESS || samples == NULL)
        return result;
    *count = keep_ours(samples, *count, sizeof *samples, offsetof(nvmlProcessUtilizationSample_t, pid));
    return *count > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t utilization_info(__typeof__(&nvmlDeviceGetProcessesUtilizationInfo) real, nvmlDevice_t device,
                                     nvmlProcessesUtilizationInfo_v1_t *information) {
    if (information != NULL && information->version != nvmlProcessesUtilizationInfo_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t result = real(device, information);
    if (result != NVML_SUCCESS || information->procUtilArray == NULL)
        return result;
    information->processSamplesCount =
        keep_ours(information->procUtilArray, information->processSamplesCount, sizeof *information->procUtilArray,
                  offsetof(nvmlProcessUtilizationInfo_v1_t, pid));
    return information->processSamplesCount > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* A list that is too short for all sessions' processes is refused with the total number, which reveals only the
 * number of processes that the device has seen. */
static nvmlReturn_t accounting_pids(__typeof__(&nvmlDeviceGetAccountingPids) real, nvmlDevice_t device,
                                    unsigned int *count, unsigned int *pids) {
    nvmlReturn_t result = real(device, count, pids);
    if (result == NVML_SUCCESS && pids != NULL)
        *count = keep_ours(pids, *count, sizeof *pids, 0);
    return result;
}

FGPU_NVML_HOOKS(FGPU_EXPORT_HOOK)
