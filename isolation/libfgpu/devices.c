/* Maps CUDA devices to the limits' devices, and claims their memory. */
#include "clock.h"
#include "parts.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define ORDINALS 64
#define TRIES 100 /* of PAUSE_NS each: half a second */
#define PAUSE_NS UINT64_C(5000000)
#define IN_VAIN_NS UINT64_C(10000000000) /* after waiting in vain, no further wait for this long */

/* ---- Names ---- */

/* The 16 bytes of a UUID's text; for another name, as simulated devices have, its 128-bit FNV-1a hash. */
static void bytes_of(const char *name, unsigned char bytes[16]) {
    unsigned digits = 0;
    for (const char *at = name; *at; at++) {
        char digit = *at | ' ';
        if (*at == '-' && (digits == 8 || digits == 12 || digits == 16 || digits == 20))
            continue;
        int value = digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
        if (value < 0 || digits == 32) {
            digits = 0;
            break;
        }
        bytes[digits / 2] = (unsigned char)(digits % 2 ? bytes[digits / 2] | value : value << 4);
        digits++;
    }
    if (digits == 32)
        return;
    unsigned __int128 hash = (unsigned __int128)UINT64_C(0x6c62272e07bb0142) << 64 | UINT64_C(0x62b821756295c58d);
    const unsigned __int128 prime = (unsigned __int128)1 << 88 | 0x13b;
    for (const char *at = name; *at; at++)
        hash = (hash ^ (unsigned char)*at) * prime;
    for (int i = 0; i < 16; i++)
        bytes[i] = (unsigned char)(hash >> (8 * (15 - i)));
}

int fgpu_device_by_bytes(const CUuuid *bytes) {
    const struct fgpu_limits *limits = fgpu_limits();
    for (unsigned i = 0; limits != NULL && i < limits->device_count; i++) {
        unsigned char own[16];
        bytes_of(limits->devices[i].uuid + 4, own); /* after GPU- or MIG- */
        if (memcmp(own, bytes->bytes, sizeof own) == 0)
            return (int)i;
    }
    return -1;
}

static uint64_t visible(const struct fgpu_device *named, uint64_t real) {
    if (named->memory_bytes <= real)
        return named->memory_bytes;
    if (named->memory_bytes == named->device_bytes) /* all of it; the driver keeps some to itself */
        return real;
    fgpu_log("larger", "device %s has %llu bytes, less than its limit of %llu (and that is not its device_mib either); "
             "nothing is granted of it", named->uuid, (unsigned long long)real,
             (unsigned long long)named->memory_bytes);
    return 0;
}

uint64_t fgpu_visible_total(int device, uint64_t real) {
    return visible(&fgpu_limits()->devices[device], real);
}

/* ---- CUDA devices ---- */

/* For each CUDA device, 0 if not asked yet, otherwise its index plus 3. */
static _Atomic(int) known[ORDINALS];
static _Atomic(int) ordinals[FGPU_MAX_DEVICES];
static _Atomic(uint64_t) real_total[FGPU_MAX_DEVICES];

void fgpu_devices_forget(void) {
    for (int i = 0; i < ORDINALS; i++)
        atomic_store(&known[i], 0);
}

static int identify(CUdevice ordinal) {
    CUuuid bytes;
    /* The second version returns the UUID of a partitioned device's instance, the first its parent's. */
    if ((DRIVER(cuDeviceGetUuid_v2) == NULL || DRIVER(cuDeviceGetUuid_v2)(&bytes, ordinal) != CUDA_SUCCESS) &&
        (DRIVER(cuDeviceGetUuid) == NULL || DRIVER(cuDeviceGetUuid)(&bytes, ordinal) != CUDA_SUCCESS))
        return FGPU_UNKNOWN; /* before cuInit, or there is no such device */
    int device = fgpu_device_by_bytes(&bytes);
    size_t total;
    if (device < 0) {
        if (fgpu_limits() != NULL)
            fgpu_log("unnamed", "CUDA device %d is not named in the limits; nothing is granted of it", ordinal);
        return FGPU_UNNAMED;
    }
    if (DRIVER(cuDeviceTotalMem_v2) == NULL || DRIVER(cuDeviceTotalMem_v2)(&total, ordinal) != CUDA_SUCCESS)
        return FGPU_UNKNOWN;
    if (fgpu_visible_total(device, total) == 0)
        return FGPU_UNNAMED;
    atomic_store(&real_total[device], total);
    atomic_store(&ordinals[device], ordinal);
    return device;
}

/* The device of the limits that a word of CUDA_VISIBLE_DEVICES means: its number among them, or an unambiguous
 * beginning of its UUID; -1: none. */
static int device_called(const struct fgpu_limits *limits, const char *word, size_t size) {
    char *end;
    unsigned long number = *word >= '0' && *word <= '9' ? strtoul(word, &end, 10) : ULONG_MAX;
    if (number < limits->device_count && end == word + size)
        return (int)number;
    int found = -1;
    for (unsigned i = 0; size > 4 && i < limits->device_count; i++)
        if (strncasecmp(limits->devices[i].uuid, word, size) == 0) {
            if (found >= 0 || limits->devices[i].uuid[size] == '\0')
                return limits->devices[i].uuid[size] == '\0' ? (int)i : -1;
            found = (int)i;
        }
    return found;
}

/* The driver would list the machine's devices. So that it lists only the session's, CUDA_VISIBLE_DEVICES becomes a list
 * of their UUIDs: all of them, or up to the first word without a device, as the driver reads a list. The variable
 * exists in a session's environment, so setenv changes one pointer and frees nothing, and other threads may call getenv
 * at the same time. */
static void name_devices(void) {
    char list[FGPU_MAX_DEVICES * FGPU_UUID_BYTES] = "";
    const struct fgpu_limits *limits = fgpu_limits();
    const char *given = getenv("CUDA_VISIBLE_DEVICES"), *word = given;
    size_t used = 0;
    for (unsigned i = 0; limits != NULL && i < FGPU_MAX_DEVICES; i++) {
        int device = (int)i < (int)limits->device_count ? (int)i : -1;
        if (given != NULL) {
            word += strspn(word, " ");
            device = device_called(limits, word, strcspn(word, " ,"));
            word += strcspn(word, ",");
            word += *word == ',';
        }
        if (device < 0)
            break;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used > 0 ? "," : "", limits->devices[device].uuid);
    }
    if (limits != NULL && (given == NULL || strcmp(given, list) != 0))
        setenv("CUDA_VISIBLE_DEVICES", list, 1);
}

FGPU_DEVICE_HOOKS(FGPU_EXPORT_HOOK)

int fgpu_device_of(CUdevice ordinal) {
    if (ordinal < 0 || ordinal >= ORDINALS)
        return FGPU_UNKNOWN;
    int found = atomic_load_explicit(&known[ordinal], memory_order_acquire);
    if (__builtin_expect(found != 0, 1))
        return found - 3;
    int device = identify(ordinal);
    if (device != FGPU_UNKNOWN)
        atomic_store_explicit(&known[ordinal], device + 3, memory_order_release);
    return device;
}

CUdevice fgpu_ordinal_of(int device) {
    return atomic_load_explicit(&ordinals[device], memory_order_relaxed);
}

uint64_t fgpu_limit_of(int device) {
    const struct fgpu_limits *limits;
    do {
        limits = fgpu_limits();
        if (limits == NULL)
            return 0;
    } while (!fgpu_limits_in_force(limits) && limits != fgpu_limits());
    if (!fgpu_limits_in_force(limits))
        return 0;
    return visible(&limits->devices[device], atomic_load_explicit(&real_total[device], memory_order_relaxed));
}

enum fgpu_verdict fgpu_reserve_in_force(int device, uint64_t bytes) {
    for (;;) {
        uint64_t revision = fgpu_revision(), limit = fgpu_limit_of(device), counted = fgpu_code_counted_to(device, limit);
        enum fgpu_verdict verdict = fgpu_reserve(device, bytes, counted < limit ? counted : limit);
        if (__builtin_expect(verdict == FGPU_OVER && counted < limit && bytes <= limit, 0)) {
            fgpu_count_code(device, limit);
            verdict = fgpu_reserve(device, bytes, limit);
        }
        if (verdict != FGPU_GRANTED || __builtin_expect(fgpu_revision() == revision, 1))
            return verdict;
        fgpu_release(device, bytes);
    }
}

int fgpu_current_device(void) {
    CUdevice ordinal;
    __typeof__(&cuCtxGetDevice) get = DRIVER(cuCtxGetDevice);
    if (get == NULL || get(&ordinal) != CUDA_SUCCESS)
        return FGPU_UNKNOWN;
    int device = fgpu_device_of(ordinal);
    return device >= 0 ? device : FGPU_UNNAMED;
}

int fgpu_current_context(CUcontext *context) {
    __typeof__(&cuCtxGetCurrent) get = DRIVER(cuCtxGetCurrent);
    if (get == NULL || get(context) != CUDA_SUCCESS || *context == NULL)
        return FGPU_UNKNOWN;
    return fgpu_current_device();
}

bool fgpu_takes_memory(CUmemLocation location, CUmemAllocationType type, int *device) {
    switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: *device = fgpu_device_of(location.id); return true;
    case CU_MEM_LOCATION_TYPE_INVALID:
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        if (type != CU_MEM_ALLOCATION_TYPE_MANAGED)
            return false;
        break; /* it may move to a device */
    default: break; /* newer than this library */
    }
    *device = fgpu_current_device();
    if (*device == FGPU_UNKNOWN)
        *device = fgpu_device_of(0);
    return true;
}

/* ---- Claims ---- */

uint64_t fgpu_rounded(uint64_t bytes) {
    return bytes > UINT64_MAX - 511 ? UINT64_MAX : (bytes + 511) & ~UINT64_C(511);
}

uint64_t fgpu_product(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

void fgpu_settle(int device) {
    fgpu_pools_settle(device, false);
    fgpu_graphs_settle(device, false);
}

CUstreamCaptureMode fgpu_relax(CUstreamCaptureMode mode) {
    if (DRIVER(cuThreadExchangeStreamCaptureMode) != NULL)
        DRIVER(cuThreadExchangeStreamCaptureMode)(&mode);
    return mode;
}

void fgpu_trim(int device) {
    CUstreamCaptureMode mode = fgpu_relax(CU_STREAM_CAPTURE_MODE_RELAXED);
    fgpu_pools_settle(device, true);
    fgpu_graphs_settle(device, true);
    fgpu_relax(mode);
}

static __attribute__((noinline)) bool claim_after_settling(int device, uint64_t bytes) {
    fgpu_settle(device);
    enum fgpu_verdict verdict = fgpu_reserve_in_force(device, bytes);
    if (verdict == FGPU_OVER && bytes <= fgpu_limit_of(device)) {
        fgpu_trim(device);
        verdict = fgpu_reserve_in_force(device, bytes);
    }
    return verdict == FGPU_GRANTED;
}

bool fgpu_try_again(unsigned tries) {
    static _Atomic(uint64_t) in_vain_at;
    uint64_t now = fgpu_now(), last = atomic_load(&in_vain_at);
    if (tries == 0 && last != 0 && now < last + IN_VAIN_NS)
        return false;
    if (tries == TRIES) {
        atomic_store(&in_vain_at, now);
        return false;
    }
    fgpu_sleep_until(now + PAUSE_NS);
    return true;
}

bool fgpu_claim(int device, uint64_t bytes) {
    if (device == FGPU_UNKNOWN)
        return true;
    if (device < 0 || bytes == UINT64_MAX)
        return false;
    fgpu_see_primary(device);
    enum fgpu_verdict verdict = fgpu_reserve_in_force(device, bytes);
    if (__builtin_expect(verdict == FGPU_GRANTED, 1))
        return true;
    return verdict == FGPU_OVER && claim_after_settling(device, bytes);
}

void fgpu_unclaim(int device, uint64_t bytes) {
    if (device >= 0)
        fgpu_release(device, bytes);
}
