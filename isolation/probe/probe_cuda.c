#include "probe_cuda.h"

#include <stdio.h>
#include <string.h>

/* The name of a result that stands for a function missing in the driver. */
#define NO_FUNCTION (-1)

static void describe(const struct cuda *cuda, char *text, size_t size, const char *call, int result)
{
    const char *name = NULL;
    __typeof__(&cuGetErrorName) error_name = CUDA_FUNCTION(cuda, cuGetErrorName);

    if (result == NO_FUNCTION) {
        snprintf(text, size, "the driver has no %s", call);
        return;
    }
    if (error_name == NULL || error_name((CUresult)result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an error that the driver does not name";
    snprintf(text, size, "%s: %s (%d)", call, name, result);
}

void cuda_error(const struct cuda *cuda, struct json *json, const char *call, int result)
{
    char text[256];

    json_name(json, "error");
    if (result != CUDA_SUCCESS)
        describe(cuda, text, sizeof(text), call, result);
    json_string(json, result == CUDA_SUCCESS ? NULL : text);
}

static bool failed(const struct cuda *cuda, struct json *json, const char *call, int result)
{
    char text[256];

    if (result == CUDA_SUCCESS)
        return false;
    describe(cuda, text, sizeof(text), call, result);
    library_section(json, "failed", text, result, cuda->library.file);
    json_raw(json, "}");
    return true;
}

bool cuda_begin(struct cuda *cuda, struct json *json)
{
    if (!library_open(&cuda->library, "libcuda.so.1", json))
        return false;

    __typeof__(&cuInit) init = CUDA_FUNCTION(cuda, cuInit);
    __typeof__(&cuDriverGetVersion) version = CUDA_FUNCTION(cuda, cuDriverGetVersion);
    __typeof__(&cuDeviceGetCount) count = CUDA_FUNCTION(cuda, cuDeviceGetCount);

    *probe_step = "cuInit";
    if (failed(cuda, json, "cuInit", init == NULL ? NO_FUNCTION : (int)init(0)) ||
        failed(cuda, json, "cuDriverGetVersion", version == NULL ? NO_FUNCTION : (int)version(&cuda->version)) ||
        failed(cuda, json, "cuDeviceGetCount", count == NULL ? NO_FUNCTION : (int)count(&cuda->count)))
        return false;
    library_section(json, "ok", NULL, 0, cuda->library.file);
    json_name(json, "driver_version");
    json_number(json, (uint64_t)cuda->version);
    return true;
}

bool cuda_uuid(const struct cuda *cuda, CUdevice device, unsigned char uuid[16])
{
    /* The newer function returns the instance of a partitioned device, the older one the device. */
    __typeof__(&cuDeviceGetUuid_v2) newer = CUDA_FUNCTION(cuda, cuDeviceGetUuid_v2);
    __typeof__(&cuDeviceGetUuid) older = CUDA_FUNCTION(cuda, cuDeviceGetUuid);
    CUuuid found;

    *probe_step = "cuDeviceGetUuid";
    if ((newer == NULL || newer(&found, device) != CUDA_SUCCESS) &&
        (older == NULL || older(&found, device) != CUDA_SUCCESS))
        return false;
    memcpy(uuid, &found, 16);
    return true;
}

/* cuDeviceTotalMem as a program gets it from cuGetProcAddress, like CUDA's runtime library. */
static __typeof__(&cuDeviceTotalMem_v2) resolved(const struct cuda *cuda, cuuint64_t flags)
{
    __typeof__(&cuGetProcAddress_v2) newer = CUDA_FUNCTION(cuda, cuGetProcAddress_v2);
    __typeof__(&cuGetProcAddress) older = CUDA_FUNCTION(cuda, cuGetProcAddress);
    CUdriverProcAddressQueryResult found;
    void *function = NULL;

    *probe_step = "cuGetProcAddress";
    if (newer != NULL && newer("cuDeviceTotalMem", &function, cuda->version, flags, &found) == CUDA_SUCCESS)
        return (__typeof__(&cuDeviceTotalMem_v2))function;
    if (older != NULL && older("cuDeviceTotalMem", &function, cuda->version, flags) == CUDA_SUCCESS)
        return (__typeof__(&cuDeviceTotalMem_v2))function;
    return NULL;
}

static void total(struct json *json, const char *way, __typeof__(&cuDeviceTotalMem_v2) ask, CUdevice device)
{
    size_t bytes = 0;

    *probe_step = "cuDeviceTotalMem";
    json_name(json, way);
    if (ask != NULL && ask(&bytes, device) == CUDA_SUCCESS)
        json_number(json, bytes);
    else
        json_raw(json, "null");
}

static void one_device(const struct cuda *cuda, struct json *json, int index)
{
    __typeof__(&cuDeviceGet) get = CUDA_FUNCTION(cuda, cuDeviceGet);
    __typeof__(&cuDeviceGetName) get_name = CUDA_FUNCTION(cuda, cuDeviceGetName);
    __typeof__(&cuDeviceGetPCIBusId) get_bus = CUDA_FUNCTION(cuda, cuDeviceGetPCIBusId);
    char name[256] = "", bus[64] = "", hex[33];
    unsigned char uuid[16];
    CUdevice device = 0;
    int result = get == NULL ? NO_FUNCTION : (int)get(&device, index);

    json_next(json);
    json_raw(json, "{");
    cuda_error(cuda, json, "cuDeviceGet", result);
    if (result == CUDA_SUCCESS) {
        bool known = cuda_uuid(cuda, device, uuid);

        for (size_t i = 0; known && i < sizeof(uuid); i++)
            snprintf(hex + 2 * i, 3, "%02x", uuid[i]);
        json_name(json, "uuid_bytes");
        json_string(json, known ? hex : NULL);
        *probe_step = "cuDeviceGetName";
        json_name(json, "name");
        json_string(json, get_name != NULL && get_name(name, sizeof(name) - 1, device) == CUDA_SUCCESS ? name : NULL);
        *probe_step = "cuDeviceGetPCIBusId";
        json_name(json, "bus_id");
        json_string(json, get_bus != NULL && get_bus(bus, sizeof(bus) - 1, device) == CUDA_SUCCESS ? bus : NULL);
        json_name(json, "total_bytes");
        json_raw(json, "{");
        total(json, "dlsym", CUDA_FUNCTION(cuda, cuDeviceTotalMem_v2), device);
        total(json, "legacy", resolved(cuda, CU_GET_PROC_ADDRESS_LEGACY_STREAM), device);
        total(json, "per_thread", resolved(cuda, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM), device);
        json_raw(json, "}");
    }
    json_raw(json, "}");
}

void probe_cuda(struct json *json, const struct options *options)
{
    struct cuda cuda;

    (void)options;
    if (!cuda_begin(&cuda, json))
        return;
    json_name(json, "devices");
    json_raw(json, "[");
    for (int i = 0; i < cuda.count && i < PROBE_MAX_DEVICES; i++)
        one_device(&cuda, json, i);
    json_raw(json, "]}");
}
