/* The code of kernels: what the driver counts for this process beyond its charge. The driver is asked as the session's
 * slice fills, at each sixteenth of it. Where NVML does not list this process, the host's count in the limits is all
 * there is. */
#include "parts.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PARTS 16 /* of the slice */
#define MORE 8   /* processes that may start between two calls */

static _Atomic(uint64_t) counted_to[FGPU_MAX_DEVICES];

void fgpu_code_forget(void) {
    for (int device = 0; device < FGPU_MAX_DEVICES; device++)
        atomic_store(&counted_to[device], 0);
}

uint64_t fgpu_code_counted_to(int device, uint64_t limit) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (limits == NULL || !limits->devices[device].counts_code)
        return UINT64_MAX;
    uint64_t to = atomic_load_explicit(&counted_to[device], memory_order_relaxed);
    return to == 0 ? limit / PARTS : to;
}

/* Once in a process: each call would need one to nvmlShutdown. */
static bool start_nvml(void) {
    static _Atomic(bool) started;
    if (atomic_load(&started))
        return true;
    __typeof__(&nvmlInit_v2) init = NULL;
    if (dlopen("libnvidia-ml.so.1", RTLD_LAZY) != NULL)
        init = (__typeof__(init))fgpu_driver_symbol("nvmlInit_v2");
    if (init != NULL && init() == NVML_SUCCESS)
        atomic_store(&started, true);
    return atomic_load(&started);
}

/* Bytes of the device that NVML counts for this process; false: it does not say. */
static bool held_by_driver(int device, uint64_t *bytes) {
    nvmlDevice_t handle;
    unsigned int count = 0, room;
    if (!start_nvml())
        return false;
    __typeof__(&nvmlDeviceGetHandleByUUID) find = DRIVER(nvmlDeviceGetHandleByUUID);
    __typeof__(&nvmlDeviceGetComputeRunningProcesses_v3) list = DRIVER(nvmlDeviceGetComputeRunningProcesses_v3);
    if (find == NULL || list == NULL || find(fgpu_limits()->devices[device].uuid, &handle) != NVML_SUCCESS)
        return false;
    list(handle, &count, NULL);
    room = count + MORE;
    nvmlProcessInfo_v2_t *processes = calloc(room, sizeof *processes);
    count = processes != NULL && list(handle, &room, processes) == NVML_SUCCESS ? room : 0;
    bool found = false;
    for (unsigned int i = 0; i < count && !found; i++) {
        *bytes = processes[i].usedGpuMemory;
        found = processes[i].pid == (unsigned int)syscall(SYS_getpid) && *bytes != UINT64_MAX;
    }
    free(processes);
    return found;
}

void fgpu_count_code(int device, uint64_t limit) {
    CUcontext current;
    uint64_t charged = fgpu_used_by_this_process(device), held;
    if (fgpu_current_context(&current) < 0) /* this may be the first context, which has no code yet */
        return;
    if (!held_by_driver(device, &held)) {
        atomic_store(&counted_to[device], UINT64_MAX);
        return;
    }
    fgpu_set_code(device, held > charged ? held - charged : 0);
    atomic_store(&counted_to[device], fgpu_used(device) + limit / PARTS);
}
