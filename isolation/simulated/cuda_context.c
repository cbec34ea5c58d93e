/* Contexts: created ones, the primary one of each device, and each thread's stack of them. */
#include "cuda_driver.h"

#include <stdlib.h>
#include <string.h>

PER_THREAD CUcontext *stack;
PER_THREAD unsigned depth;
static _Atomic(unsigned long long) next_id = 1;

static CUcontext top(void)
{
    return depth ? stack[depth - 1] : NULL;
}

CUresult current_context(CUcontext *out)
{
    READY();
    if (!ledger_wait_unlocked())
        return CUDA_ERROR_UNKNOWN;
    *out = top();
    if (!*out)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*out)->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

static bool valid(CUcontext context)
{
    return context && context->magic == CONTEXT && !context->destroyed;
}

static CUresult push(CUcontext context)
{
    if (!stack && !(stack = calloc(CONTEXT_STACK, sizeof *stack)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (depth == CONTEXT_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static const size_t first_limits[] = {1024, 4194304, 8388608, 2, 2048, 128};

static CUcontext fresh(struct device *device, unsigned flags)
{
    CUcontext context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    context->magic = CONTEXT;
    context->device = device;
    context->flags = flags;
    context->id = atomic_fetch_add(&next_id, 1);
    memcpy(context->limits, first_limits, sizeof first_limits);
    stream_init(&context->legacy, context, 0, 0);
    context->legacy.legacy = true;
    return context;
}

/* Its memory is taken from the device for as long as it lives. */
CUresult context_create(struct device *device, unsigned flags, bool primary, CUcontext *out)
{
    uint64_t bytes = device->machine->context_bytes;
    if (flags & ~0xffu)
        return CUDA_ERROR_INVALID_VALUE;
    if (!ledger_join())
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (bytes && !ledger_take(device->machine, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUcontext context = fresh(device, flags);
    if (!context) {
        ledger_give(device->machine, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->primary = primary;
    context->charged = bytes;
    ledger_count_context(device->machine, 1);
    *out = context;
    return CUDA_SUCCESS;
}

CUresult context_create_green(struct device *device, CUgreenCtx green, CUcontext *out)
{
    CUcontext context = fresh(device, 0);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->green = green;
    *out = context;
    return CUDA_SUCCESS;
}

/* The object stays, marked: threads may have it current, or come with its streams. */
void context_destroy(CUcontext context)
{
    context_wait(context);
    context->destroyed = true;
    memory_of_context_free(context);
    modules_of_context_unload(context);
    ledger_give(context->device->machine, context->charged);
    if (!context->green)
        ledger_count_context(context->device->machine, -1);
}

/* ---- created contexts ------------------------------------------------------------------------------------ */

static CUresult create(CUcontext *out, unsigned flags, CUdevice ordinal)
{
    READY();
    struct device *device = device_of(ordinal);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUresult result = context_create(device, flags, false, out);
    return result ? result : push(*out);
}

CALL(cuCtxCreate, 2000, cuCtxCreate, CUcontext *out, unsigned int flags, CUdevice device)
{
    return create(out, flags, device);
}

CALL(cuCtxCreate, 3020, cuCtxCreate_v2, CUcontext *out, unsigned int flags, CUdevice device)
{
    return create(out, flags, device);
}

CALL(cuCtxCreate, 11040, cuCtxCreate_v3, CUcontext *out, CUexecAffinityParam *affinity, int count, unsigned int flags,
     CUdevice device)
{
    (void)affinity;
    if (count < 0)
        return CUDA_ERROR_INVALID_VALUE;
    /* Needs MPS. */
    return count ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}

CALL(cuCtxCreate, 12050, cuCtxCreate_v4, CUcontext *out, CUctxCreateParams *parameters, unsigned int flags,
     CUdevice device)
{
    if (parameters && (parameters->numExecAffinityParams || parameters->cigParams))
        return CUDA_ERROR_NOT_SUPPORTED;
    return create(out, flags, device);
}

static CUresult destroy(CUcontext context)
{
    READY();
    if (!valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    /* Who wants to be rid of the primary one releases it. */
    if (context->primary || context->green)
        return CUDA_ERROR_INVALID_CONTEXT;
    SAFE();
    LOCKED;
    context_destroy(context);
    if (top() == context)
        depth--;
    return CUDA_SUCCESS;
}

CALL(cuCtxDestroy, 2000, cuCtxDestroy, CUcontext context)
{
    return destroy(context);
}

CALL(cuCtxDestroy, 4000, cuCtxDestroy_v2, CUcontext context)
{
    return destroy(context);
}

/* Before CUDA 4, contexts counted their users. No program of today does so. */
CALL(cuCtxAttach, 2000, cuCtxAttach, CUcontext *out, unsigned int flags)
{
    CURRENT(context);
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *out = context;
    return CUDA_SUCCESS;
}

CALL(cuCtxDetach, 2000, cuCtxDetach, CUcontext context)
{
    return destroy(context);
}

/* ---- primary contexts -------------------------------------------------------------------------------------- */

CUresult primary_retain(struct device *device, CUcontext *out)
{
    if (!device->primary) {
        CUresult result = context_create(device, device->primary_flags, true, &device->primary);
        if (result)
            return result;
    }
    device->retained++;
    *out = device->primary;
    return CUDA_SUCCESS;
}

static void primary_destroy(struct device *device)
{
    if (device->primary)
        context_destroy(device->primary);
    device->primary = NULL;
    device->retained = 0;
    pools_reset(device);
    graph_memory_reset(device);
}

CUresult primary_release(struct device *device)
{
    if (!device->retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->retained == 0)
        primary_destroy(device);
    return CUDA_SUCCESS;
}

#define DEVICE(variable, ordinal) \
    READY(); \
    struct device *variable = device_of(ordinal); \
    if (!variable) \
        return CUDA_ERROR_INVALID_DEVICE; \
    LOCKED

CALL(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain, CUcontext *out, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    return out ? primary_retain(device, out) : CUDA_ERROR_INVALID_VALUE;
}

/* As NVIDIA's runtime has it from a table of the driver's own (cuda_table.c): past the exported function. */
CUresult primary_retain_by_table(CUcontext *out, CUdevice ordinal)
{
    DEVICE(device, ordinal);
    return out ? primary_retain(device, out) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult release(CUdevice ordinal)
{
    DEVICE(device, ordinal);
    return primary_release(device);
}

CALL(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease, CUdevice device)
{
    return release(device);
}

CALL(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    return release(device);
}

/* All that is in it goes; who retained it still has to release it, and the next retain makes a new one. */
static CUresult reset(CUdevice ordinal)
{
    DEVICE(device, ordinal);
    SAFE();
    primary_destroy(device);
    return CUDA_SUCCESS;
}

CALL(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset, CUdevice device)
{
    return reset(device);
}

CALL(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2, CUdevice device)
{
    return reset(device);
}

CALL(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState, CUdevice ordinal, unsigned int *flags, int *active)
{
    /* Only read, so it does not wait while the process is locked. */
    READY();
    struct device *device = device_of(ordinal);
    if (!device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = device->primary_flags;
    *active = device->primary != NULL;
    return CUDA_SUCCESS;
}

/* ---- each thread's stack ------------------------------------------------------------------------------------- */

static CUresult push_current(CUcontext context)
{
    READY();
    return valid(context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

CALL(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2, CUcontext context)
{
    return push_current(context);
}

static CUresult pop_current(CUcontext *out)
{
    READY();
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out)
        *out = stack[depth];
    return CUDA_SUCCESS;
}

CALL(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2, CUcontext *out)
{
    return pop_current(out);
}

CALL(cuCtxSetCurrent, 4000, cuCtxSetCurrent, CUcontext context)
{
    READY();
    if (context && !valid(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth)
        depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

CALL(cuCtxGetCurrent, 4000, cuCtxGetCurrent, CUcontext *out)
{
    READY();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = top();
    return CUDA_SUCCESS;
}

/* ---- asking and waiting ---------------------------------------------------------------------------------------- */

/* With a context, about that one; without, about the current one. */
#define ABOUT(variable, given) \
    READY(); \
    CUcontext variable = (given) ? (given) : top(); \
    if (!valid(variable)) \
        return CUDA_ERROR_INVALID_CONTEXT

static CUresult device_of_context(CUdevice *device, CUcontext given)
{
    ABOUT(context, given);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device->ordinal;
    return CUDA_SUCCESS;
}

CALL(cuCtxGetDevice, 2000, cuCtxGetDevice, CUdevice *device)
{
    return device_of_context(device, NULL);
}

CALL(cuCtxGetDevice, 13000, cuCtxGetDevice_v2, CUdevice *device, CUcontext context)
{
    return device_of_context(device, context);
}

static CUresult synchronise(CUcontext given)
{
    ABOUT(context, given);
    if (!ledger_wait_unlocked())
        return CUDA_ERROR_UNKNOWN;
    SAFE();
    context_wait(context);
    pools_release(context->device);
    return CUDA_SUCCESS;
}

CALL(cuCtxSynchronize, 2000, cuCtxSynchronize, void)
{
    return synchronise(NULL);
}

CALL(cuCtxSynchronize, 13000, cuCtxSynchronize_v2, CUcontext context)
{
    return synchronise(context);
}

CALL(cuCtxGetLimit, 3010, cuCtxGetLimit, size_t *value, CUlimit limit)
{
    CURRENT(context);
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)limit >= 8)
        return (CUresult)215; /* CUDA_ERROR_UNSUPPORTED_LIMIT */
    *value = context->limits[limit];
    return CUDA_SUCCESS;
}

/* What stacks, print buffer and heap take beyond what they have at first, which is part of the context's own. */
static bool limit_bytes(const struct device *device, CUlimit limit, size_t value, uint64_t *bytes)
{
    uint64_t threads = limit == CU_LIMIT_STACK_SIZE ? (uint64_t)THREADS_PER_SM * device->machine->sm_count : 1;
    *bytes = 0;
    return limit > CU_LIMIT_MALLOC_HEAP_SIZE || value <= first_limits[limit] ||
           !__builtin_mul_overflow(value - first_limits[limit], threads, bytes);
}

CALL(cuCtxSetLimit, 3010, cuCtxSetLimit, CUlimit limit, size_t value)
{
    CURRENT(context);
    uint64_t before, after;
    if ((unsigned)limit >= 8)
        return (CUresult)215;
    LOCKED;
    const struct machine_device *on = context->device->machine;
    limit_bytes(context->device, limit, context->limits[limit], &before);
    if (!limit_bytes(context->device, limit, value, &after) || (after > before && !ledger_take(on, after - before)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    ledger_give(on, after < before ? before - after : 0);
    context->charged += after - before;
    context->limits[limit] = value;
    return CUDA_SUCCESS;
}
