/* Starting the driver, and what its devices are. */
#include "cuda_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct device devices[MACHINE_DEVICES];
int device_count;
const struct machine *machine;

static _Atomic(int) state = CUDA_ERROR_NOT_INITIALIZED;
static _Atomic(bool) forked;

pthread_mutex_t driver_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

int lock_driver(void)
{
    ledger_wait_unlocked();
    pthread_mutex_lock(&driver_lock);
    return 0;
}

void unlock_driver(int *ignored)
{
    (void)ignored;
    pthread_mutex_unlock(&driver_lock);
}

CUresult driver_ready(void)
{
    return (CUresult)atomic_load_explicit(&state, memory_order_acquire);
}

struct device *device_of(CUdevice ordinal)
{
    return ordinal >= 0 && ordinal < device_count ? &devices[ordinal] : NULL;
}

/* As with NVIDIA's driver: a child that inherits an initialised driver can do nothing with it. */
static void in_child(void)
{
    pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    driver_lock = fresh;
    ledger_leave_to_parent();
    atomic_store(&forked, true);
    atomic_store(&state, CUDA_ERROR_NOT_INITIALIZED);
}

/* ---- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------- */

static bool show(const struct machine_device *device)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i].machine == device)
            return false;
    devices[device_count] = (struct device){.machine = device, .ordinal = device_count};
    device_count++;
    return true;
}

/* A UUID or as much of its beginning as is no other's. */
static const struct machine_device *device_called(const char *word)
{
    const struct machine_device *found = NULL;
    for (unsigned i = 0; i < machine->count; i++) {
        const struct machine_device *device = &machine->devices[i];
        if (strncasecmp(device->uuid, word, strlen(word)) != 0)
            continue;
        if (!device->uuid[strlen(word)])
            return device;
        if (found)
            return NULL;
        found = device;
    }
    return found;
}

static const struct machine_device *gpu_numbered(unsigned long number)
{
    for (unsigned i = 0; i < machine->count; i++)
        if (machine->devices[i].parent < 0 && number-- == 0)
            return &machine->devices[i];
    return NULL;
}

static const struct machine_device *first_instance(const struct machine_device *gpu)
{
    for (unsigned i = 0; i < machine->count; i++)
        if (machine->devices[i].parent == gpu - machine->devices)
            return &machine->devices[i];
    return NULL;
}

/* Devices are shown up to the first word that means none. A process sees one MIG instance at most, and with it no
 * GPUs. A device named twice makes the whole list void. */
static void show_named(char *list)
{
    for (char *word = strtok(list, ","); word; word = strtok(NULL, ",")) {
        char *end = NULL;
        word += strspn(word, " ");
        word[strcspn(word, " ")] = 0;
        unsigned long number = *word >= '0' && *word <= '9' ? strtoul(word, &end, 10) : 0;
        const struct machine_device *device = end && !*end ? gpu_numbered(number)
                                              : !strncasecmp(word, "GPU-", 4) || !strncasecmp(word, "MIG-", 4)
                                                  ? device_called(word)
                                                  : NULL;
        if (device && device->parent < 0 && device->instances)
            device = first_instance(device);
        if (!device || (device->parent >= 0 && device_count))
            return;
        if (!show(device)) {
            device_count = 0;
            return;
        }
        if (device->parent >= 0)
            return;
    }
}

static void show_devices(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    if (visible) {
        char list[4096];
        snprintf(list, sizeof list, "%s", visible);
        show_named(list);
        return;
    }
    for (unsigned i = 0; i < machine->count; i++)
        if (machine->devices[i].parent < 0 && !machine->devices[i].instances)
            show(&machine->devices[i]);
    for (unsigned i = 0; i < machine->count && !device_count; i++)
        if (machine->devices[i].parent >= 0)
            show(&machine->devices[i]);
}

CALL(cuInit, 2000, cuInit, unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!driver_ready())
        return CUDA_SUCCESS; /* also while the process is locked */
    LOCKED;
    if (atomic_load(&forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!driver_ready())
        return CUDA_SUCCESS;
    machine = machine_load();
    if (!machine)
        return CUDA_ERROR_NO_DEVICE;
    show_devices();
    if (!device_count)
        return CUDA_ERROR_NO_DEVICE;
    pthread_atfork(NULL, NULL, in_child);
    atomic_store_explicit(&state, CUDA_SUCCESS, memory_order_release);
    return CUDA_SUCCESS;
}

/* ---- devices ------------------------------------------------------------------------------------------- */

#define DEVICE(variable, ordinal) \
    READY(); \
    struct device *variable = device_of(ordinal); \
    if (!variable) \
        return CUDA_ERROR_INVALID_DEVICE

CALL(cuDeviceGet, 2000, cuDeviceGet, CUdevice *device, int ordinal)
{
    DEVICE(found, ordinal);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = found->ordinal;
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetCount, 2000, cuDeviceGetCount, int *count)
{
    READY();
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetName, 2000, cuDeviceGetName, char *name, int size, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    if (!name || size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)size, "%s", device->machine->name);
    return CUDA_SUCCESS;
}

static CUresult uuid(CUuuid *out, CUdevice ordinal, bool of_instance)
{
    DEVICE(device, ordinal);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    const struct machine_device *of = device->machine;
    if (!of_instance && of->parent >= 0)
        of = &machine->devices[of->parent];
    memcpy(out->bytes, of->uuid_bytes, sizeof out->bytes);
    return CUDA_SUCCESS;
}

CALL(cuDeviceGetUuid, 9020, cuDeviceGetUuid, CUuuid *out, CUdevice device)
{
    return uuid(out, device, false);
}

CALL(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2, CUuuid *out, CUdevice device)
{
    return uuid(out, device, true);
}

CALL(cuDeviceTotalMem, 2000, cuDeviceTotalMem, unsigned int *bytes, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = device->machine->memory_bytes > UINT32_MAX ? UINT32_MAX : (unsigned)device->machine->memory_bytes;
    return CUDA_SUCCESS;
}

CALL(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2, size_t *bytes, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = device->machine->memory_bytes;
    return CUDA_SUCCESS;
}

/* A MIG instance is at its GPU's place. */
static unsigned bus_of(const struct device *device)
{
    const struct machine_device *at = device->machine;
    return 1 + (at->parent >= 0 ? machine->devices[at->parent].ordinal : at->ordinal);
}

CALL(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId, char *id, int size, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    if (!id || size < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)size, "0000:%02X:00.0", bus_of(device));
    return CUDA_SUCCESS;
}

/* What is the same on every simulated device: that of a large data-centre GPU. Attributes that are not named here
 * are 0: not supported. */
static const int attributes[160] = {
    [1] = 1024,         /* threads in a block */
    [2] = 1024, [3] = 1024, [4] = 64,
    [5] = 2147483647, [6] = 65535, [7] = 65535,
    [8] = 49152,        /* shared memory of a block */
    [9] = 65536,        /* constant memory */
    [10] = 32,          /* warp */
    [11] = 2147483647,  /* pitch */
    [12] = 65536,       /* registers of a block */
    [13] = 1980000,     /* clock, kHz */
    [14] = 512, [15] = 1,
    [19] = 1,           /* host memory can be mapped */
    [21] = 131072, [22] = 131072, [23] = 65536, [24] = 16384, [25] = 16384, [26] = 16384,
    [27] = 32768, [28] = 32768, [29] = 2048,
    [30] = 512, [31] = 1, [32] = 1,
    [36] = 2619000, [37] = 5120, [38] = 52428800, [39] = THREADS_PER_SM, [40] = 3, [41] = 1,
    [42] = 32768, [43] = 2048, [45] = 32768, [46] = 32768,
    [51] = 32, [52] = 32768, [53] = 32768, [54] = 2046,
    [55] = 32768, [56] = 131072, [57] = 65536, [58] = 16384, [59] = 16384, [60] = 16384, [61] = 32768, [62] = 2048,
    [63] = 32768, [64] = 32768, [65] = 2048, [66] = 32768, [67] = 32768, [68] = 2046,
    [69] = 268435456, [70] = 131072, [71] = 65000, [72] = 2097120, [73] = 32768, [74] = 32768,
    [77] = 32768, [78] = 1, [79] = 1, [80] = 1,
    [81] = 233472, [82] = 65536, [83] = 1, [87] = 2, [89] = 1, [90] = 1, [91] = 1, [92] = 0,
    [95] = 1, [97] = 232448, [99] = 1,
    [102] = 1, [103] = 1, [106] = 32, [111] = 1024, [115] = 1, [119] = 1, [120] = 1,
};

CALL(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute, int *value, CUdevice_attribute attribute, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    if (!value || (int)attribute < 1 || (unsigned)attribute >= sizeof attributes / sizeof *attributes)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = (int)device->machine->sm_count;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = (int)device->machine->major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = (int)device->machine->minor;
        break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        *value = (int)bus_of(device);
        break;
    default:
        *value = attributes[attribute];
    }
    return CUDA_SUCCESS;
}
