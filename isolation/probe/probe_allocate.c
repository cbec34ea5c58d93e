/* Tries the limits: 2 MiB above each must be refused, half of it granted. */
#include "probe_cuda.h"

#include <string.h>

struct memory {
    __typeof__(&cuMemAlloc_v2) take;
    __typeof__(&cuMemFree_v2) give_back;
    __typeof__(&cuMemGetInfo_v2) info;
    __typeof__(&cuDevicePrimaryCtxRetain) retain;
    __typeof__(&cuDevicePrimaryCtxRelease_v2) release;
    __typeof__(&cuCtxSetCurrent) use;
};

static int hexadecimal(char digit)
{
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    if (digit >= 'a' && digit <= 'f')
        return digit - 'a' + 10;
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

/* The driver's bytes of a UUID: those that it spells; for another name, as simulated devices have, its 128-bit FNV-1a
 * hash. */
static void bytes_of(const struct limit *limit, unsigned char bytes[16])
{
    const char *name = limit->uuid + 4;
    size_t length = limit->uuid_length - 4, digits = 0;
    unsigned __int128 hash = ((unsigned __int128)0x6c62272e07bb0142u << 64) | 0x62b821756295c58du;
    const unsigned __int128 prime = ((unsigned __int128)1 << 88) | 0x13b;

    memset(bytes, 0, 16);
    for (size_t i = 0; i < length; i++) {
        int value = hexadecimal(name[i]);

        hash = (hash ^ (unsigned char)name[i]) * prime;
        if (value >= 0 && digits < 32)
            bytes[digits / 2] = (unsigned char)(bytes[digits / 2] << 4 | value);
        digits += value >= 0 ? 1u : name[i] == '-' ? 0u : 33u;
    }
    for (size_t i = 0; digits != 32 && i < 16; i++)
        bytes[i] = (unsigned char)(hash >> (120 - 8 * i));
}

static void attempt(struct json *json, const char *name, const struct memory *memory, uint64_t bytes)
{
    CUdeviceptr pointer = 0;
    int result;

    *probe_step = "cuMemAlloc";
    result = memory->take(&pointer, bytes);
    if (result == CUDA_SUCCESS)
        memory->give_back(pointer);
    json_name(json, name);
    json_raw(json, "{");
    json_name(json, "bytes");
    json_number(json, bytes);
    json_name(json, "code");
    json_number(json, (uint64_t)result);
    json_raw(json, "}");
}

static void try_device(const struct cuda *cuda, struct json *json, const struct memory *memory, CUdevice device,
                       uint64_t memory_mib)
{
    CUcontext context = NULL;
    size_t available = 0, whole = 0;
    const char *call = "cuDevicePrimaryCtxRetain";
    int result;

    *probe_step = call;
    result = memory->retain(&context, device);
    if (result == CUDA_SUCCESS) {
        *probe_step = call = "cuCtxSetCurrent";
        result = memory->use(context);
    }
    if (result == CUDA_SUCCESS) {
        *probe_step = call = "cuMemGetInfo";
        result = memory->info(&available, &whole);
    }
    cuda_error(cuda, json, call, result);
    if (result == CUDA_SUCCESS) {
        json_name(json, "total_bytes");
        json_number(json, whole);
        json_name(json, "free_bytes");
        json_number(json, available);
        attempt(json, "over", memory, (memory_mib + 2) * PROBE_MIB);
        attempt(json, "half", memory, memory_mib * PROBE_MIB / 2);
    }
    if (context != NULL)
        memory->release(device);
}

static CUdevice find(const struct cuda *cuda, const struct limit *limit)
{
    __typeof__(&cuDeviceGet) get = CUDA_FUNCTION(cuda, cuDeviceGet);
    unsigned char wanted[16], found[16];
    CUdevice device;

    bytes_of(limit, wanted);
    for (int i = 0; get != NULL && i < cuda->count; i++)
        if (get(&device, i) == CUDA_SUCCESS && cuda_uuid(cuda, device, found) && memcmp(wanted, found, 16) == 0)
            return device;
    return -1;
}

void probe_allocate(struct json *json, const struct options *options)
{
    struct cuda cuda;

    if (!cuda_begin(&cuda, json))
        return;

    struct memory memory = {
        .take = CUDA_FUNCTION(&cuda, cuMemAlloc_v2),
        .give_back = CUDA_FUNCTION(&cuda, cuMemFree_v2),
        .info = CUDA_FUNCTION(&cuda, cuMemGetInfo_v2),
        .retain = CUDA_FUNCTION(&cuda, cuDevicePrimaryCtxRetain),
        .release = CUDA_FUNCTION(&cuda, cuDevicePrimaryCtxRelease_v2),
        .use = CUDA_FUNCTION(&cuda, cuCtxSetCurrent),
    };
    bool complete = memory.take != NULL && memory.give_back != NULL && memory.info != NULL && memory.retain != NULL &&
                    memory.release != NULL && memory.use != NULL;

    json_name(json, "devices");
    json_raw(json, "[");
    for (unsigned i = 0; i < options->limit_count; i++) {
        const struct limit *limit = &options->limits[i];
        CUdevice device = find(&cuda, limit);

        json_next(json);
        json_raw(json, "{");
        json_name(json, "uuid");
        json_bytes(json, limit->uuid, limit->uuid_length);
        if (device < 0 || !complete) {
            json_name(json, "error");
            json_string(json, complete ? "the driver shows no such device" : "the driver lacks a function");
        } else {
            try_device(&cuda, json, &memory, device, limit->memory_mib);
        }
        json_raw(json, "}");
    }
    json_raw(json, "]}");
}
