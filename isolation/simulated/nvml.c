/* The simulated NVML: the library itself, the system, and how devices are found and called. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>

static _Atomic(int) initialised;

const struct machine *nvml_machine(void)
{
    return atomic_load(&initialised) > 0 ? machine_load() : NULL;
}

const struct machine_device *nvml_device(nvmlDevice_t handle, nvmlReturn_t *why)
{
    const struct machine *machine = nvml_machine();
    *why = machine ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED;
    for (unsigned i = 0; machine && i < machine->count; i++)
        if (handle == (nvmlDevice_t)&machine->devices[i])
            return &machine->devices[i];
    return NULL;
}

nvmlReturn_t nvml_text(const char *text, char *out, unsigned size)
{
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

/* ---- the library ---------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    /* A machine whose file is malformed has a broken driver, not no GPU. */
    if (!machine_load())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    atomic_fetch_add(&initialised, 1);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

NVML_EXPORT nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

NVML_EXPORT nvmlReturn_t nvmlShutdown(void)
{
    int count = atomic_load(&initialised);
    do
        if (count == 0)
            return NVML_ERROR_UNINITIALIZED;
    while (!atomic_compare_exchange_weak(&initialised, &count, count - 1));
    return NVML_SUCCESS;
}

NVML_EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_INSUFFICIENT_RESOURCES:
        return "Insufficient Resources";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    case NVML_ERROR_DEPRECATED:
        return "The requested functionality has been deprecated";
    default:
        return "Unknown Error";
    }
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int size)
{
    const struct machine *machine = nvml_machine();
    return machine ? nvml_text(machine->driver, out, size) : NVML_ERROR_UNINITIALIZED;
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int size)
{
    char text[64];
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    snprintf(text, sizeof text, "%d.%s", machine->cuda_version / 1000, machine->driver);
    return nvml_text(text, out, size);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = machine->cuda_version;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int size)
{
    char path[32], text[256];
    if (!nvml_machine())
        return NVML_ERROR_UNINITIALIZED;
    if (!name || size == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    size_t read = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[read] = 0;
    if (read == 0)
        return NVML_ERROR_NOT_FOUND;
    snprintf(name, size, "%s", text);
    return NVML_SUCCESS;
}

/* ---- finding devices ------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = machine->gpu_count;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

static nvmlReturn_t handle_of(int parent, unsigned ordinal, nvmlReturn_t none, nvmlDevice_t *out)
{
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < machine->count; i++)
        if (machine->devices[i].parent == parent && machine->devices[i].ordinal == ordinal) {
            *out = (nvmlDevice_t)&machine->devices[i];
            return NVML_SUCCESS;
        }
    return none;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    return handle_of(-1, index, NVML_ERROR_INVALID_ARGUMENT, device);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < machine->count; i++)
        if (!strcmp(machine->devices[i].uuid, uuid)) {
            *out = (nvmlDevice_t)&machine->devices[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

static void bus_id(const struct machine_device *device, nvmlPciInfo_t *out)
{
    memset(out, 0, sizeof *out);
    out->bus = device->ordinal + 1;
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "0000:%02X:00.0", out->bus);
    snprintf(out->busId, sizeof out->busId, "00000000:%02X:00.0", out->bus);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (device->parent >= 0)
        device = &nvml_machine()->devices[device->parent];
    bus_id(device, out);
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *out)
{
    nvmlPciInfo_t info;
    const struct machine *machine = nvml_machine();
    if (!machine)
        return NVML_ERROR_UNINITIALIZED;
    if (!id || !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < machine->count; i++) {
        bus_id(&machine->devices[i], &info);
        if (machine->devices[i].parent < 0 && (!strcasecmp(id, info.busId) || !strcasecmp(id, info.busIdLegacy))) {
            *out = (nvmlDevice_t)&machine->devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned int *index)
{
    DEVICE_OR_RETURN(device, handle);
    if (!index)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = device->ordinal;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned int *minor)
{
    return nvmlDeviceGetIndex(handle, minor);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *out, unsigned int size)
{
    DEVICE_OR_RETURN(device, handle);
    return nvml_text(device->name, out, size);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *out, unsigned int size)
{
    DEVICE_OR_RETURN(device, handle);
    return nvml_text(device->uuid, out, size);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t handle, int *major, int *minor)
{
    DEVICE_OR_RETURN(device, handle);
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)device->major;
    *minor = (int)device->minor;
    return NVML_SUCCESS;
}

/* ---- MIG --------------------------------------------------------------------------------------------- */

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned int *current, unsigned int *pending)
{
    DEVICE_OR_RETURN(device, handle);
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = device->instances ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned int *count)
{
    DEVICE_OR_RETURN(device, handle);
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = device->parent < 0 ? MACHINE_INSTANCES : 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned int index, nvmlDevice_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (device->parent >= 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    return handle_of((int)(device - nvml_machine()->devices), index, NVML_ERROR_NOT_FOUND, out);
}

NVML_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned int *is_mig)
{
    DEVICE_OR_RETURN(device, handle);
    if (!is_mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    *is_mig = device->parent >= 0;
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *out)
{
    DEVICE_OR_RETURN(device, handle);
    if (device->parent < 0 || !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = (nvmlDevice_t)&nvml_machine()->devices[device->parent];
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_id(nvmlDevice_t handle, unsigned int *id)
{
    DEVICE_OR_RETURN(device, handle);
    if (device->parent < 0 || !id)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = device->ordinal;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned int *id);
NVML_EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned int *id)
{
    return instance_id(handle, id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned int *id);
NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned int *id)
{
    nvmlReturn_t result = instance_id(handle, id);
    if (result == NVML_SUCCESS)
        *id = 0;
    return result;
}

/* ---- what a simulated device does not have -------------------------------------------------------------- */

#define ANSWER(name, error)                              \
    nvmlReturn_t name(nvmlDevice_t handle);              \
    NVML_EXPORT nvmlReturn_t name(nvmlDevice_t handle)   \
    {                                                    \
        DEVICE_OR_RETURN(device, handle);                \
        return error;                                    \
    }
#define NOT_SUPPORTED(name) ANSWER(name, NVML_ERROR_NOT_SUPPORTED)

NOT_SUPPORTED(nvmlDeviceGetAccountingStats_v2)
ANSWER(nvmlDeviceGetDisplayMode, NVML_ERROR_DEPRECATED) /* as drivers from R580 on say */
NOT_SUPPORTED(nvmlDeviceGetTemperature)
NOT_SUPPORTED(nvmlDeviceGetTemperatureV)
NOT_SUPPORTED(nvmlDeviceGetTemperatureThreshold)
NOT_SUPPORTED(nvmlDeviceGetFanSpeed)
NOT_SUPPORTED(nvmlDeviceGetPowerUsage)
NOT_SUPPORTED(nvmlDeviceGetEnforcedPowerLimit)
NOT_SUPPORTED(nvmlDeviceGetPowerManagementLimit)
NOT_SUPPORTED(nvmlDeviceGetTotalEnergyConsumption)
NOT_SUPPORTED(nvmlDeviceGetPersistenceMode)
NOT_SUPPORTED(nvmlDeviceGetPerformanceState)
NOT_SUPPORTED(nvmlDeviceGetDisplayActive)
NOT_SUPPORTED(nvmlDeviceGetTotalEccErrors)
NOT_SUPPORTED(nvmlDeviceGetClockInfo)
NOT_SUPPORTED(nvmlDeviceGetMaxClockInfo)
NOT_SUPPORTED(nvmlDeviceGetEncoderUtilization)
NOT_SUPPORTED(nvmlDeviceGetDecoderUtilization)
NOT_SUPPORTED(nvmlDeviceGetPcieThroughput)
NOT_SUPPORTED(nvmlDeviceGetSerial)
NOT_SUPPORTED(nvmlDeviceGetFieldValues)
NOT_SUPPORTED(nvmlDeviceGetDriverModel)
NOT_SUPPORTED(nvmlDeviceGetDriverModel_v2)
NOT_SUPPORTED(nvmlDeviceGetAttributes_v2)
NOT_SUPPORTED(nvmlDeviceGetBoardPartNumber)
NOT_SUPPORTED(nvmlDeviceGetVbiosVersion)
NOT_SUPPORTED(nvmlDeviceGetConfComputeMemSizeInfo)
NOT_SUPPORTED(nvmlDeviceGetCurrentClocksThrottleReasons)
NOT_SUPPORTED(nvmlDeviceGetApplicationsClock)
NOT_SUPPORTED(nvmlDeviceGetEccMode)
NOT_SUPPORTED(nvmlDeviceGetCurrPcieLinkGeneration)
NOT_SUPPORTED(nvmlDeviceGetCurrPcieLinkWidth)
NOT_SUPPORTED(nvmlDeviceGetNvLinkState)
NOT_SUPPORTED(nvmlDeviceGetPowerManagementDefaultLimit)
NOT_SUPPORTED(nvmlDeviceGetPowerManagementLimitConstraints)
NOT_SUPPORTED(nvmlDeviceGetTopologyCommonAncestor)
NOT_SUPPORTED(nvmlDeviceGetP2PStatus)
NOT_SUPPORTED(nvmlDeviceRegisterEvents)

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, unsigned int *mode);
NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t handle, unsigned int *mode)
{
    DEVICE_OR_RETURN(device, handle);
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = 0; /* the default: any number of processes */
    return NVML_SUCCESS;
}

NVML_EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t handle, unsigned int *mode)
{
    DEVICE_OR_RETURN(device, handle);
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_ERROR_NOT_SUPPORTED;
}
