/* Contexts: each takes memory itself (the limits say how much), and its end frees what was allocated in it. */
#include "parts.h"

#include <stdlib.h>

struct context {
    const void *handle;
    int device;
    unsigned uses; /* of cuCtxAttach, which is obsolete */
    struct context *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *contexts;

/* One for each device. The lock guards changes of `fgpu_primary_charged` together with the charge; under it only the
 * region is called. */
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic(bool) fgpu_primary_charged[FGPU_MAX_DEVICES];
static _Atomic(const void *) latest_created[FGPU_MAX_DEVICES]; /* by the program, and not destroyed */

void fgpu_contexts_forget(void) {
    lock = primary_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    contexts = NULL;
    for (int i = 0; i < FGPU_MAX_DEVICES; i++) {
        atomic_store(&fgpu_primary_charged[i], false);
        atomic_store(&latest_created[i], NULL);
    }
}

static uint64_t size_on(int device) {
    return fgpu_limits()->devices[device].context_bytes;
}

/* ---- Contexts that a program creates ---- */

static struct context **find(const void *handle) {
    struct context **place = &contexts;
    while (*place != NULL && (*place)->handle != handle)
        place = &(*place)->next;
    return place;
}

/* A process with a context has a slot in the region, even where contexts are free. */
static bool may_create(CUdevice ordinal) {
    int device = fgpu_device_of(ordinal);
    return fgpu_claim(device, device >= 0 ? size_on(device) : 0);
}

/* Records a context, with the lock held; false if it must be destroyed again: there is no memory for the record, or it
 * came into being on a device that the driver said it does not know. */
static bool add(const void *handle, int device) {
    struct context *context = device < 0 ? NULL : calloc(1, sizeof *context);
    if (context != NULL) {
        *context = (struct context){handle, device, 1, contexts};
        contexts = context;
        atomic_store(&latest_created[device], handle);
    }
    return context != NULL;
}

static void drop(struct context **place) {
    struct context *context = *place;
    *place = context->next;
    if (atomic_load(&latest_created[context->device]) == context->handle)
        atomic_store(&latest_created[context->device], NULL);
    fgpu_unclaim(context->device, size_on(context->device));
    free(context);
}

static CUresult created(CUcontext *context, CUdevice ordinal, CUresult result) {
    int device = fgpu_device_of(ordinal);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS && !add(*context, device)) {
        DRIVER(cuCtxDestroy_v2)(*context);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS && device >= 0)
        fgpu_unclaim(device, size_on(device));
    pthread_mutex_unlock(&lock);
    return result;
}

static bool is_this(void *context, int device, const void *data) {
    (void)device;
    return context == data;
}

/* The context has ended; both locks are held. */
static void ended(CUcontext handle) {
    struct context **place = find(handle);
    if (*place != NULL)
        drop(place);
    fgpu_release_memory_of(is_this, handle);
    fgpu_throttle_context_ended(handle, -1);
}

static CUresult destroy(__typeof__(&cuCtxDestroy_v2) real, CUcontext context) {
    pthread_mutex_lock(&lock);
    fgpu_memory_lock();
    CUresult result = real(context);
    if (result == CUDA_SUCCESS)
        ended(context);
    fgpu_memory_unlock();
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult attach(__typeof__(&cuCtxAttach) real, CUcontext *context, unsigned int flags) {
    pthread_mutex_lock(&lock);
    CUresult result = real(context, flags);
    if (result == CUDA_SUCCESS && *find(*context) != NULL)
        (*find(*context))->uses++;
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult detach(__typeof__(&cuCtxDetach) real, CUcontext context) {
    pthread_mutex_lock(&lock);
    fgpu_memory_lock();
    CUresult result = real(context);
    struct context *known = *find(context);
    if (result == CUDA_SUCCESS && known != NULL && --known->uses == 0)
        ended(context);
    fgpu_memory_unlock();
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- Primary contexts ---- */

enum presence { ABSENT, PRESENT, UNKNOWN_PRESENCE };

static enum presence presence_of(CUdevice ordinal) {
    unsigned int flags;
    int active;
    __typeof__(&cuDevicePrimaryCtxGetState) get = DRIVER(cuDevicePrimaryCtxGetState);
    if (get == NULL || get(ordinal, &flags, &active) != CUDA_SUCCESS)
        return UNKNOWN_PRESENCE;
    return active ? PRESENT : ABSENT;
}

/* The driver has made the primary context: charge it whatever the limit. If it does not fit, all allocations are refused
 * until there is room. */
void fgpu_look_for_primary(int device) {
    CUcontext current = NULL;
    if (DRIVER(cuCtxGetCurrent) != NULL && DRIVER(cuCtxGetCurrent)(&current) == CUDA_SUCCESS && current != NULL &&
        current == atomic_load_explicit(&latest_created[device], memory_order_relaxed))
        return; /* the newest context that the program created is in use: look when the primary one is */
    pthread_mutex_lock(&primary_lock);
    if (!atomic_load(&fgpu_primary_charged[device]) &&
        presence_of(fgpu_ordinal_of(device)) == PRESENT) {
        fgpu_charge_anyway(device, size_on(device));
        atomic_store(&fgpu_primary_charged[device], true);
    }
    pthread_mutex_unlock(&primary_lock);
}

/* Marks the primary context as charged; whether it was not before. The caller then claims the bytes. */
static bool mark_charged(int device) {
    pthread_mutex_lock(&primary_lock);
    bool before = atomic_exchange(&fgpu_primary_charged[device], true);
    pthread_mutex_unlock(&primary_lock);
    return !before;
}

static void mark_uncharged(int device, bool release) {
    pthread_mutex_lock(&primary_lock);
    bool before = atomic_exchange(&fgpu_primary_charged[device], false);
    if (before && release)
        fgpu_unclaim(device, size_on(device));
    pthread_mutex_unlock(&primary_lock);
}

static CUresult entered(CUresult result) {
    int device = result == CUDA_SUCCESS ? fgpu_current_device() : FGPU_UNKNOWN;
    if (device >= 0)
        fgpu_see_primary(device);
    return result;
}

/* Runs `make`, which makes the device's primary context if there is none; charges it before, if not yet charged. */
#define WITH_PRIMARY(device, make) \
    ({ \
        pthread_mutex_lock(&lock); \
        fgpu_see_primary(device); \
        bool claims = mark_charged(device); \
        bool claimed = claims && fgpu_claim(device, size_on(device)); \
        CUresult made = !claims || claimed ? FGPU_RETRY(make) : CUDA_ERROR_OUT_OF_MEMORY; \
        if (claims && made != CUDA_SUCCESS) \
            mark_uncharged(device, claimed); \
        pthread_mutex_unlock(&lock); \
        made; \
    })

/* On a device without a limit nothing is made. For FGPU_UNKNOWN the driver tries, for its error; a success is undone. */
#define UNGRANTED(device, make, undo) \
    ({ \
        CUresult answer = (device) == FGPU_UNKNOWN ? (make) : CUDA_ERROR_OUT_OF_MEMORY; \
        if (answer == CUDA_SUCCESS) \
            (undo); \
        answer == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : answer; \
    })

static CUresult retain(__typeof__(&cuDevicePrimaryCtxRetain) real, CUcontext *context, CUdevice ordinal) {
    int device = fgpu_device_of(ordinal);
    return device < 0 ? UNGRANTED(device, real(context, ordinal), DRIVER(cuDevicePrimaryCtxRelease_v2)(ordinal))
                      : WITH_PRIMARY(device, real(context, ordinal));
}

/* Whether an allocation is the primary context's: of no context that the program created, or of a green one. */
static bool is_of_primary(void *context, int device, const void *data) {
    return device == *(const int *)data && *find(context) == NULL;
}

/* Called with `lock` and the memory lock held; after_primary() without them. */
static void primary_ended(int device) {
    fgpu_release_memory_of(is_of_primary, &device);
    mark_uncharged(device, true);
}

static void after_primary(int device) {
    fgpu_pools_drop(device);
    fgpu_throttle_context_ended(NULL, device);
}

/* A release or a reset: if the context is then gone, so is everything allocated in it. */
static CUresult release_primary(__typeof__(&cuDevicePrimaryCtxRelease_v2) real, CUdevice ordinal) {
    int device = fgpu_device_of(ordinal);
    pthread_mutex_lock(&lock);
    fgpu_memory_lock();
    bool was_there = device >= 0 && presence_of(ordinal) == PRESENT;
    CUresult result = real(ordinal);
    bool gone = was_there && result == CUDA_SUCCESS && presence_of(ordinal) == ABSENT;
    if (gone)
        primary_ended(device);
    fgpu_memory_unlock();
    pthread_mutex_unlock(&lock);
    if (gone)
        after_primary(device);
    return result;
}

/* ---- Green contexts: parts of the primary one, which lives as long as they do ---- */

static CUresult create_green(__typeof__(&cuGreenCtxCreate) real, CUgreenCtx *context, CUdevResourceDesc resources,
                             CUdevice ordinal, unsigned int flags) {
    int device = fgpu_device_of(ordinal);
    return device < 0
               ? UNGRANTED(device, real(context, resources, ordinal, flags), DRIVER(cuGreenCtxDestroy)(*context))
               : WITH_PRIMARY(device, real(context, resources, ordinal, flags));
}

static CUresult destroy_green(__typeof__(&cuGreenCtxDestroy) real, CUgreenCtx context) {
    CUcontext current = NULL; /* the context under which launches know it */
    bool gone[FGPU_MAX_DEVICES] = {false};
    pthread_mutex_lock(&lock);
    fgpu_memory_lock();
    if (DRIVER(cuCtxFromGreenCtx) != NULL)
        DRIVER(cuCtxFromGreenCtx)(&current, context);
    CUresult result = real(context);
    for (int device = 0; device < FGPU_MAX_DEVICES; device++) { /* its device is unknown: any with a lost context */
        gone[device] = result == CUDA_SUCCESS && atomic_load(&fgpu_primary_charged[device]) &&
                       presence_of(fgpu_ordinal_of(device)) == ABSENT;
        if (gone[device])
            primary_ended(device);
    }
    fgpu_memory_unlock();
    pthread_mutex_unlock(&lock);
    if (result == CUDA_SUCCESS && current != NULL)
        fgpu_throttle_context_ended(current, -1);
    for (int device = 0; device < FGPU_MAX_DEVICES; device++)
        if (gone[device])
            after_primary(device);
    return result;
}

/* ---- Heaps and stacks ---- */

/* malloc() in kernels allocates from a heap, printing uses a buffer, and every thread that can run at once has a stack;
 * a program chooses their sizes. The initial sizes are part of the context's memory; more is charged until the context
 * ends. */
static bool has_size(CUlimit limit) {
    return limit == CU_LIMIT_STACK_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE || limit == CU_LIMIT_PRINTF_FIFO_SIZE;
}

/* UINT64_MAX if the driver does not tell the number of threads. */
static uint64_t bytes_for(CUlimit limit, uint64_t value, int device) {
    if (limit != CU_LIMIT_STACK_SIZE || device < 0)
        return value;
    __typeof__(&cuDeviceGetAttribute) get = DRIVER(cuDeviceGetAttribute);
    CUdevice ordinal = fgpu_ordinal_of(device);
    int threads, processors;
    if (get == NULL || get(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, ordinal) != CUDA_SUCCESS ||
        get(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, ordinal) != CUDA_SUCCESS)
        return UINT64_MAX;
    return fgpu_product(value, (uint64_t)threads * (uint64_t)processors);
}

/* Keys in the table of addresses, like those of arrays: handles are even, and these are odd. */
static CUdeviceptr key_of(CUcontext context, CUlimit limit) {
    return ((CUdeviceptr)(uintptr_t)context | UINT64_C(1) << 63) + 1 + (CUdeviceptr)limit;
}

static CUresult resize(__typeof__(&cuCtxSetLimit) real, CUlimit limit, size_t value, CUcontext context, int device) {
    struct fgpu_holding held, more = {.owner = context, .device = device};
    size_t now = 0;
    CUresult result = DRIVER(cuCtxGetLimit)(&now, limit);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t before = bytes_for(limit, now, device), then = bytes_for(limit, value, device);
    if (then == UINT64_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fgpu_free_begins(key_of(context, limit), &held);
    uint64_t first = before > held.bytes ? before - held.bytes : 0;
    more.bytes = then > first ? then - first : 0;
    uint64_t growth = more.bytes > held.bytes ? more.bytes - held.bytes : 0;
    bool claimed = fgpu_claim(device, growth);
    result = claimed ? FGPU_RETRY(real(limit, value)) : CUDA_ERROR_OUT_OF_MEMORY;
    if (claimed) /* the charge without the part that stays */
        fgpu_unclaim(device, held.bytes + growth - (result == CUDA_SUCCESS ? more.bytes : held.bytes));
    const struct fgpu_holding *stays = result == CUDA_SUCCESS ? &more : &held;
    if (stays->bytes != 0) /* without memory for the record it stays charged */
        fgpu_hold_memory(key_of(context, limit), *stays);
    return result;
}

static CUresult set_limit(__typeof__(&cuCtxSetLimit) real, CUlimit limit, size_t value) {
    CUcontext context = NULL;
    int device = fgpu_current_context(&context);
    if (!has_size(limit) || device == FGPU_UNKNOWN || DRIVER(cuCtxGetLimit) == NULL)
        return real(limit, value);
    pthread_mutex_lock(&lock);
    CUresult result = resize(real, limit, value, context, device);
    pthread_mutex_unlock(&lock);
    return result;
}

FGPU_CONTEXT_HOOKS(FGPU_EXPORT_GATED_HOOK)
FGPU_CURRENT_HOOKS(FGPU_EXPORT_HOOK)
