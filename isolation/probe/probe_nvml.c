#include "probe.h"

#include "nvml_abi.h"

#include <stdio.h>

#define NVML_FUNCTION(library, name) ((__typeof__(&name))library_function(library, #name))

/* The name of a result that stands for a function missing in the library. */
#define NO_FUNCTION (-1)

static void describe(const struct library *library, char *text, size_t size, const char *call, int result)
{
    __typeof__(&nvmlErrorString) error_string = NVML_FUNCTION(library, nvmlErrorString);
    const char *words = error_string == NULL ? NULL : error_string((nvmlReturn_t)result);

    if (result == NO_FUNCTION)
        snprintf(text, size, "NVML has no %s", call);
    else
        snprintf(text, size, "%s: %s (%d)", call, words == NULL ? "an unnamed error" : words, result);
}

static bool failed(const struct library *library, struct json *json, const char *call, int result)
{
    char text[256];

    if (result == NVML_SUCCESS)
        return false;
    describe(library, text, sizeof(text), call, result);
    library_section(json, "failed", text, result, library->file);
    json_raw(json, "}");
    return true;
}

static void totals(const struct library *library, struct json *json, nvmlDevice_t device)
{
    __typeof__(&nvmlDeviceGetMemoryInfo) older = NVML_FUNCTION(library, nvmlDeviceGetMemoryInfo);
    __typeof__(&nvmlDeviceGetMemoryInfo_v2) newer = NVML_FUNCTION(library, nvmlDeviceGetMemoryInfo_v2);
    nvmlMemory_t memory;
    nvmlMemory_v2_t memory_v2 = {.version = nvmlMemory_v2};

    *probe_step = "nvmlDeviceGetMemoryInfo";
    json_name(json, "total_bytes");
    json_raw(json, "{");
    json_name(json, "v1");
    if (older != NULL && older(device, &memory) == NVML_SUCCESS)
        json_number(json, memory.total);
    else
        json_raw(json, "null");
    json_name(json, "v2");
    /* Drivers before 510 have the first version only. */
    if (newer != NULL && newer(device, &memory_v2) == NVML_SUCCESS)
        json_number(json, memory_v2.total);
    else
        json_raw(json, "null");
    json_raw(json, "}");
}

static void one_device(const struct library *library, struct json *json, nvmlDevice_t device, const char *parent)
{
    __typeof__(&nvmlDeviceGetUUID) get_uuid = NVML_FUNCTION(library, nvmlDeviceGetUUID);
    __typeof__(&nvmlDeviceGetName) get_name = NVML_FUNCTION(library, nvmlDeviceGetName);
    __typeof__(&nvmlDeviceGetPciInfo_v3) get_bus = NVML_FUNCTION(library, nvmlDeviceGetPciInfo_v3);
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "", name[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "", text[256];
    nvmlPciInfo_t pci = {.busId = ""};
    int result = get_uuid == NULL ? NO_FUNCTION : (int)get_uuid(device, uuid, sizeof(uuid));

    json_next(json);
    json_raw(json, "{");
    if (result != NVML_SUCCESS)
        describe(library, text, sizeof(text), "nvmlDeviceGetUUID", result);
    json_name(json, "error");
    json_string(json, result == NVML_SUCCESS ? NULL : text);
    json_name(json, "uuid");
    json_string(json, result == NVML_SUCCESS ? uuid : NULL);
    json_name(json, "parent");
    json_string(json, parent);
    json_name(json, "name");
    json_string(json, get_name != NULL && get_name(device, name, sizeof(name)) == NVML_SUCCESS ? name : NULL);
    json_name(json, "bus_id");
    json_string(json, get_bus != NULL && get_bus(device, &pci) == NVML_SUCCESS ? pci.busId : NULL);
    totals(library, json, device);
    json_raw(json, "}");
}

/* The instances of a partitioned device, as separate devices. */
static void instances(const struct library *library, struct json *json, nvmlDevice_t device)
{
    __typeof__(&nvmlDeviceGetMigMode) get_mode = NVML_FUNCTION(library, nvmlDeviceGetMigMode);
    __typeof__(&nvmlDeviceGetMaxMigDeviceCount) get_count = NVML_FUNCTION(library, nvmlDeviceGetMaxMigDeviceCount);
    __typeof__(&nvmlDeviceGetMigDeviceHandleByIndex) get_instance =
        NVML_FUNCTION(library, nvmlDeviceGetMigDeviceHandleByIndex);
    __typeof__(&nvmlDeviceGetUUID) get_uuid = NVML_FUNCTION(library, nvmlDeviceGetUUID);
    char parent[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "";
    unsigned mode = 0, pending = 0, count = 0;
    nvmlDevice_t instance;

    if (get_mode == NULL || get_count == NULL || get_instance == NULL || get_uuid == NULL ||
        get_mode(device, &mode, &pending) != NVML_SUCCESS || mode != NVML_DEVICE_MIG_ENABLE ||
        get_count(device, &count) != NVML_SUCCESS || get_uuid(device, parent, sizeof(parent)) != NVML_SUCCESS)
        return;
    for (unsigned i = 0; i < count; i++)
        if (get_instance(device, i, &instance) == NVML_SUCCESS)
            one_device(library, json, instance, parent);
}

void probe_nvml(struct json *json, const struct options *options)
{
    struct library library;
    unsigned count = 0;
    char version[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "", text[256];

    (void)options;
    if (!library_open(&library, "libnvidia-ml.so.1", json))
        return;

    __typeof__(&nvmlInit_v2) init = NVML_FUNCTION(&library, nvmlInit_v2);
    __typeof__(&nvmlDeviceGetCount_v2) get_count = NVML_FUNCTION(&library, nvmlDeviceGetCount_v2);
    __typeof__(&nvmlDeviceGetHandleByIndex_v2) get_device = NVML_FUNCTION(&library, nvmlDeviceGetHandleByIndex_v2);
    __typeof__(&nvmlSystemGetDriverVersion) get_version = NVML_FUNCTION(&library, nvmlSystemGetDriverVersion);

    *probe_step = "nvmlInit";
    if (failed(&library, json, "nvmlInit", init == NULL ? NO_FUNCTION : (int)init()) ||
        failed(&library, json, "nvmlDeviceGetCount", get_count == NULL ? NO_FUNCTION : (int)get_count(&count)) ||
        failed(&library, json, "nvmlDeviceGetHandleByIndex", get_device == NULL ? NO_FUNCTION : 0))
        return;
    library_section(json, "ok", NULL, 0, library.file);
    json_name(json, "driver_version");
    json_string(json, get_version != NULL && get_version(version, sizeof(version)) == NVML_SUCCESS ? version : NULL);
    json_name(json, "devices");
    json_raw(json, "[");
    for (unsigned i = 0; i < count && i < PROBE_MAX_DEVICES; i++) {
        nvmlDevice_t device = NULL;
        int result;

        *probe_step = "nvmlDeviceGetHandleByIndex";
        result = (int)get_device(i, &device);
        if (result == NVML_SUCCESS) {
            one_device(&library, json, device, NULL);
            instances(&library, json, device);
        } else {
            describe(&library, text, sizeof(text), "nvmlDeviceGetHandleByIndex", result);
            json_next(json);
            json_raw(json, "{");
            json_name(json, "error");
            json_string(json, text);
            json_raw(json, "}");
        }
    }
    json_raw(json, "]}");
}
