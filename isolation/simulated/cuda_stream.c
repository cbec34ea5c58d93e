/* Streams, events, and waiting. A stream remembers when its work will be done: all time is known at launch. */
#include "cuda_driver.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define SPIN_NS 20000u

/* The version that every glibc has. Older ones have it in a library of its own, which a program without threads may
 * not have loaded. */
#if defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17");
#endif
#pragma weak pthread_create

static _Atomic(unsigned long long) next_id = 1;

struct own_stream {
    CUcontext context;
    struct own_stream *next;
    struct CUstream_st stream;
};
PER_THREAD struct own_stream *own_streams;

static void raise_to(_Atomic(uint64_t) *place, uint64_t time)
{
    uint64_t was = atomic_load_explicit(place, memory_order_relaxed);
    while (was < time && !atomic_compare_exchange_weak(place, &was, time))
        ;
}

void stream_init(CUstream stream, CUcontext context, unsigned flags, int priority)
{
    *stream = (struct CUstream_st){.magic = STREAM,
                                   .context = context,
                                   .flags = flags,
                                   .priority = priority > 0 ? 0 : priority < -5 ? -5 : priority,
                                   .id = atomic_fetch_add(&next_id, 1),
                                   .lock = PTHREAD_MUTEX_INITIALIZER};
}

/* A thread has a stream of its own in each context. */
CUstream thread_stream(CUcontext context)
{
    for (struct own_stream *own = own_streams; own; own = own->next)
        if (own->context == context)
            return &own->stream;
    struct own_stream *own = calloc(1, sizeof *own);
    if (!own)
        return &context->legacy;
    own->context = context;
    own->next = own_streams;
    own_streams = own;
    stream_init(&own->stream, context, 0, 0);
    return &own->stream;
}

CUresult stream_of(CUstream handle, bool per_thread, CUstream *out)
{
    if (handle > CU_STREAM_PER_THREAD) {
        *out = handle;
        ledger_wait_unlocked();
        CUresult ready = driver_ready();
        return ready                                                       ? ready
               : handle->magic != STREAM                                   ? CUDA_ERROR_INVALID_HANDLE
               : handle->context->destroyed                                ? CUDA_ERROR_CONTEXT_IS_DESTROYED
                                                                           : CUDA_SUCCESS;
    }
    CURRENT(context);
    if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread)) {
        *out = thread_stream(context);
        return CUDA_SUCCESS;
    }
    *out = &context->legacy;
    return capture_forbids_legacy(context);
}

#define STREAM(variable, handle) \
    CUstream variable; \
    do { \
        CUresult stream_ = stream_of(handle, per_thread, &variable); \
        if (stream_) \
            return stream_; \
    } while (0)

/* ---- time ------------------------------------------------------------------------------------------------- */

/* Sleeps until shortly before, then looks at the clock: a sleep alone ends some 50 us late. */
void wait_until(uint64_t time)
{
    uint64_t now = machine_now();
    if (time <= now)
        return;
    if (time - now > SPIN_NS) {
        uint64_t wake = time - SPIN_NS;
        struct timespec until = {(time_t)(wake / 1000000000u), (long)(wake % 1000000000u)};
        int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
            ;
        if (slack > 0)
            prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
    }
    while (machine_now() < time)
        ;
}

/* The legacy stream waits for those that are not marked as independent of it, and they for it. */
uint64_t stream_ready_at(CUstream stream)
{
    CUcontext context = stream->context;
    uint64_t ready = atomic_load_explicit(&stream->last, memory_order_relaxed), other = 0;
    if (stream->legacy)
        other = atomic_load_explicit(&context->blocking_last, memory_order_relaxed);
    else if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        other = atomic_load_explicit(&context->legacy_last, memory_order_relaxed);
    return ready > other ? ready : other;
}

void stream_advance(CUstream stream, uint64_t time)
{
    CUcontext context = stream->context;
    raise_to(&stream->last, time);
    raise_to(&context->all_last, time);
    if (stream->legacy)
        raise_to(&context->legacy_last, time);
    else if (!(stream->flags & CU_STREAM_NON_BLOCKING))
        raise_to(&context->blocking_last, time);
}

CUresult stream_run(CUstream stream, uint64_t duration, uint64_t kernels)
{
    pthread_mutex_lock(&stream->lock);
    uint64_t *place = &stream->ends[stream->queued % QUEUE_DEPTH];
    /* The queue is full, so the first of these has to be done. */
    if (stream->queued >= QUEUE_DEPTH && *place > machine_now())
        wait_until(*place);
    uint64_t end = ledger_queue(stream->context->device->machine, stream_ready_at(stream), duration, kernels);
    *place = end;
    stream->queued++;
    stream_advance(stream, end);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

/* ---- host functions: one thread runs them in the order of their times ------------------------------------------ */

struct host_call {
    uint64_t time;
    CUstream stream;
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
    struct host_call *next;
};

static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t calls_changed = PTHREAD_COND_INITIALIZER;
static struct host_call *calls;
static bool caller_runs;

static void *run_calls(void *ignored)
{
    (void)ignored;
    pthread_mutex_lock(&calls_lock);
    for (;;) {
        struct host_call *call = calls;
        uint64_t now = machine_now();
        if (!call) {
            pthread_cond_wait(&calls_changed, &calls_lock);
            continue;
        }
        if (call->time > now) {
            /* By short steps, because an earlier one may arrive. */
            uint64_t step = call->time - now < 200000 ? call->time : now + 200000;
            pthread_mutex_unlock(&calls_lock);
            wait_until(step);
            pthread_mutex_lock(&calls_lock);
            continue;
        }
        calls = call->next;
        pthread_mutex_unlock(&calls_lock);
        if (call->function)
            call->function(call->data);
        else
            call->callback(call->stream, CUDA_SUCCESS, call->data);
        pthread_mutex_lock(&calls_lock);
        atomic_fetch_sub(&call->stream->callbacks, 1);
        atomic_fetch_sub(&call->stream->context->callbacks, 1);
        free(call);
        pthread_cond_broadcast(&calls_changed);
    }
    return NULL;
}

CUresult stream_call(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data)
{
    struct host_call *call = calloc(1, sizeof *call);
    if (!call)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *call = (struct host_call){stream_ready_at(stream), stream, function, callback, data, NULL};
    pthread_mutex_lock(&calls_lock);
    if (!caller_runs) {
        pthread_t thread;
        if (!pthread_create || pthread_create(&thread, NULL, run_calls, NULL) != 0) {
            pthread_mutex_unlock(&calls_lock);
            free(call);
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        caller_runs = true;
    }
    atomic_fetch_add(&stream->callbacks, 1);
    atomic_fetch_add(&stream->context->callbacks, 1);
    struct host_call **place = &calls;
    while (*place && (*place)->time <= call->time)
        place = &(*place)->next;
    call->next = *place;
    *place = call;
    pthread_cond_broadcast(&calls_changed);
    pthread_mutex_unlock(&calls_lock);
    return CUDA_SUCCESS;
}

static void wait_for_calls(_Atomic(uint32_t) *count)
{
    if (!atomic_load(count))
        return;
    pthread_mutex_lock(&calls_lock);
    while (atomic_load(count))
        pthread_cond_wait(&calls_changed, &calls_lock);
    pthread_mutex_unlock(&calls_lock);
}

void stream_wait(CUstream stream)
{
    wait_until(stream_ready_at(stream));
    wait_for_calls(&stream->callbacks);
}

void context_wait(CUcontext context)
{
    wait_until(atomic_load(&context->all_last));
    wait_for_calls(&context->callbacks);
}

/* ---- streams ------------------------------------------------------------------------------------------------------ */

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    CURRENT(context);
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = malloc(sizeof *stream);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stream_init(stream, context, flags, priority);
    *out = stream;
    return CUDA_SUCCESS;
}

CALL(cuStreamCreate, 2000, cuStreamCreate, CUstream *out, unsigned int flags)
{
    return create(out, flags, 0);
}

CALL(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority, CUstream *out, unsigned int flags, int priority)
{
    return create(out, flags, priority);
}

/* Returns at once; what is queued still runs. */
static CUresult destroy(CUstream stream)
{
    READY();
    if (stream <= CU_STREAM_PER_THREAD || stream->magic != STREAM)
        return CUDA_ERROR_INVALID_HANDLE;
    LOCKED;
    capture_stream_gone(stream);
    wait_for_calls(&stream->callbacks);
    free(stream->behind);
    stream->magic = 0;
    free(stream);
    return CUDA_SUCCESS;
}

CALL(cuStreamDestroy, 4000, cuStreamDestroy_v2, CUstream stream)
{
    return destroy(stream);
}

STREAMED(cuStreamQuery, 2000, cuStreamQuery, _ptsz, (CUstream handle), (handle))
{
    STREAM(stream, handle);
    CUresult forbidden = capture_forbids(stream);
    if (forbidden)
        return forbidden;
    return stream_ready_at(stream) > machine_now() || atomic_load(&stream->callbacks) ? CUDA_ERROR_NOT_READY
                                                                                     : CUDA_SUCCESS;
}

STREAMED(cuStreamSynchronize, 2000, cuStreamSynchronize, _ptsz, (CUstream handle), (handle))
{
    STREAM(stream, handle);
    CUresult forbidden = capture_forbids(stream);
    if (forbidden)
        return forbidden;
    stream_wait(stream);
    pools_release(stream->context->device);
    return CUDA_SUCCESS;
}

STREAMED(cuStreamWaitEvent, 3020, cuStreamWaitEvent, _ptsz, (CUstream handle, CUevent event, unsigned int flags),
         (handle, event, flags))
{
    STREAM(stream, handle);
    bool handled = false;
    if (!event || event->magic != EVENT)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = capture_wait(stream, event, flags, &handled);
    if (!result && !handled)
        stream_advance(stream, atomic_load(&event->time));
    return result;
}

STREAMED(cuStreamAddCallback, 5000, cuStreamAddCallback, _ptsz,
         (CUstream handle, CUstreamCallback callback, void *data, unsigned int flags), (handle, callback, data, flags))
{
    STREAM(stream, handle);
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult forbidden = capture_forbids(stream);
    return forbidden ? forbidden : stream_call(stream, NULL, callback, data);
}

STREAMED(cuStreamGetPriority, 5050, cuStreamGetPriority, _ptsz, (CUstream handle, int *priority), (handle, priority))
{
    STREAM(stream, handle);
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

STREAMED(cuStreamGetFlags, 5050, cuStreamGetFlags, _ptsz, (CUstream handle, unsigned int *flags), (handle, flags))
{
    STREAM(stream, handle);
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

STREAMED(cuStreamGetCtx, 9020, cuStreamGetCtx, _ptsz, (CUstream handle, CUcontext *context), (handle, context))
{
    STREAM(stream, handle);
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = stream->context;
    return CUDA_SUCCESS;
}

/* ---- events --------------------------------------------------------------------------------------------------------- */

#define EVENT_OF(event) \
    READY(); \
    if (!(event) || (event)->magic != EVENT) \
    return CUDA_ERROR_INVALID_HANDLE

CALL(cuEventCreate, 2000, cuEventCreate, CUevent *out, unsigned int flags)
{
    CURRENT(context);
    if (!out || flags & ~7u || (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->magic = EVENT;
    event->context = context;
    event->flags = flags;
    *out = event;
    return CUDA_SUCCESS;
}

static CUresult destroy_event(CUevent event)
{
    EVENT_OF(event);
    LOCKED;
    capture_event_forget(event);
    event->magic = 0;
    free(event);
    return CUDA_SUCCESS;
}

CALL(cuEventDestroy, 4000, cuEventDestroy_v2, CUevent event)
{
    return destroy_event(event);
}

/* An event has its place behind the stream's work. Where there is none left, it needs the device no less: it comes to
 * pass when the kernel that runs there, if that is another process's, is done. */
void event_record(CUevent event, CUstream stream)
{
    uint64_t now = machine_now(), time = stream_ready_at(stream);
    if (time <= now)
        time = ledger_foreign_turn_ends(stream->context->device->machine, now);
    stream_advance(stream, time);
    atomic_store(&event->time, time);
    event->recorded = true;
}

static CUresult record(CUevent event, CUstream handle, bool per_thread, unsigned flags)
{
    EVENT_OF(event);
    STREAM(stream, handle);
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->context->device != event->context->device)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        if (!(flags & CU_EVENT_RECORD_EXTERNAL))
            return capture_event(event, stream);
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD};
        *event_of(&parameters) = event;
        return capture_add(stream, &parameters, NULL);
    }
    if (event->capture) {
        LOCKED;
        capture_event_forget(event);
    }
    event_record(event, stream);
    return CUDA_SUCCESS;
}

STREAMED(cuEventRecord, 2000, cuEventRecord, _ptsz, (CUevent event, CUstream stream), (event, stream))
{
    return record(event, stream, per_thread, 0);
}

static CUresult may_ask(CUevent event)
{
    EVENT_OF(event);
    CUresult forbidden = capture_forbids_unsafe();
    return forbidden ? forbidden : event->capture ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

/* An event that was never recorded is complete. */
CALL(cuEventQuery, 2000, cuEventQuery, CUevent event)
{
    CUresult result = may_ask(event);
    return result ? result : atomic_load(&event->time) > machine_now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CALL(cuEventSynchronize, 2000, cuEventSynchronize, CUevent event)
{
    CUresult result = may_ask(event);
    if (result)
        return result;
    wait_until(atomic_load(&event->time));
    pools_release(event->context->device);
    return CUDA_SUCCESS;
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    EVENT_OF(start);
    EVENT_OF(end);
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (!start->recorded || !end->recorded || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t from = atomic_load(&start->time), to = atomic_load(&end->time), now = machine_now();
    if (from > now || to > now)
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(to - from) / 1e6);
    return CUDA_SUCCESS;
}

CALL(cuEventElapsedTime, 2000, cuEventElapsedTime, float *milliseconds, CUevent start, CUevent end)
{
    return elapsed(milliseconds, start, end);
}

CALL(cuEventElapsedTime, 12080, cuEventElapsedTime_v2, float *milliseconds, CUevent start, CUevent end)
{
    return elapsed(milliseconds, start, end);
}
