/* Holds the session to its share of each device's time: README.md, "Compute", has the idea, gate.h the rules and the
 * bound. It uses no thread and no signals: everything happens in the program's launches. */
#include "throttle.h"

#include "account.h"
#include "clock.h"
#include "gate.h"
#include "parts.h"
#include "words.h"

#include <stdlib.h>
#include <string.h>

#define CONTEXTS 64
#define POLL_LEAST_NS UINT64_C(30000)
#define POLL_MOST_NS UINT64_C(500000)
#define MOST_PATIENCE_NS UINT64_C(3600000000000)

_Atomic(bool) fgpu_unthrottled;

static struct context *_Atomic contexts[CONTEXTS];
static _Atomic(int) captures;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(bool) limits_known;

static __attribute__((noinline)) void read_limits(void) {
    const struct fgpu_limits *limits = fgpu_limits();
    bool any = false;
    pthread_mutex_lock(&contexts_lock);
    for (unsigned n = 0; !limits_known && limits != NULL && n < limits->device_count; n++)
        any |= limits->devices[n].compute;
    if (!limits_known)
        atomic_store(&fgpu_unthrottled, !any);
    atomic_store(&limits_known, true);
    pthread_mutex_unlock(&contexts_lock);
}

/* A child's context, if it gets one, is not the parent's. The parent's tables stay where they are. */
void fgpu_throttle_forget(void) {
    contexts_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (int n = 0; n < CONTEXTS; n++)
        atomic_store(&contexts[n], NULL);
    atomic_store(&captures, 0);
}

/* ---- Contexts ---- */

/* Takes over the current limits of the device. */
static void take_slots(struct context *context, const struct fgpu_limits *limits) {
    const struct fgpu_device *device = &limits->devices[context->device];
    context->revision = fgpu_revision_word();
    context->seen_revision = limits->revision;
    if (device->slot_count == 0)
        return; /* compute is no longer limited: running work goes on as before */
    slots_from_limits(&context->slots_held, device);
    context->slots = &context->slots_held;
    context->slot = (struct slot){0};
    context->lending.own = device->lending;
    context->lending.most = device->most_percent;
    context->lending.slots = device->compute_percent;
}

static __attribute__((noinline)) void see_new_limits(struct context *context) {
    const struct fgpu_limits *limits = fgpu_limits();
    if (limits != NULL && limits->revision != context->seen_revision)
        take_slots(context, limits);
}

/* Checks for a changed slice before each launch: it costs three loads. */
static inline void see_limits(struct context *context) {
    if (__builtin_expect(atomic_load_explicit(context->revision, memory_order_acquire) != context->seen_revision, 0))
        see_new_limits(context);
}

/* With the lock held: a free entry becomes this context's. */
static void begin_context(struct context *context, CUcontext handle, int device) {
    memset(&context->sentinels, 0, sizeof *context - offsetof(struct context, sentinels));
    context->device = device;
    context->account = fgpu_time_account(device);
    take_slots(context, fgpu_limits());
    context->said_until = context->lending.own == 0 ? UINT64_MAX : 0;
    context->patience = THROTTLE_PATIENCE_NS;
    atomic_store_explicit(&context->handle, handle, memory_order_release);
}

/* Takes an entry for a context; NULL if compute is not limited, or no entry is possible. */
static struct context *add_context(CUcontext handle) {
    int device = fgpu_current_device();
    const struct fgpu_limits *limits = fgpu_limits();
    if (device < 0 || limits == NULL || !limits->devices[device].compute || fgpu_time_account(device) == NULL)
        return NULL;
    struct context *found = NULL;
    pthread_mutex_lock(&contexts_lock);
    for (int n = 0; n < CONTEXTS && found == NULL; n++) {
        struct context *context = atomic_load(&contexts[n]);
        if (context == NULL) {
            found = calloc(1, sizeof *found);
            if (found == NULL)
                break;
            throttle_begin_lock(&found->lock);
            begin_context(found, handle, device);
            atomic_store_explicit(&contexts[n], found, memory_order_release);
        } else if (atomic_load(&context->handle) == NULL) {
            found = context;
            throttle_lock(found);
            begin_context(found, handle, device);
            throttle_unlock(found);
        }
    }
    pthread_mutex_unlock(&contexts_lock);
    if (found == NULL)
        fgpu_log("contexts", "too many CUDA contexts: compute is not limited in all of them");
    return found;
}

/* The current context; a new one only if `add`. */
static inline struct context *current_context(bool add) {
    CUcontext handle;
    __typeof__(&cuCtxGetCurrent) get = DRIVER(cuCtxGetCurrent);
    if (get == NULL || get(&handle) != CUDA_SUCCESS || handle == NULL)
        return NULL;
    for (int n = 0; n < CONTEXTS; n++) {
        struct context *context = atomic_load_explicit(&contexts[n], memory_order_acquire);
        if (context == NULL)
            break;
        if (__builtin_expect(atomic_load_explicit(&context->handle, memory_order_relaxed) == handle, 1))
            return context;
    }
    return add ? add_context(handle) : NULL;
}

/* Its events are gone. The handle may become another context's. */
void fgpu_throttle_context_ended(const void *handle, int device) {
    for (int n = 0; n < CONTEXTS; n++) {
        struct context *context = atomic_load(&contexts[n]);
        if (context == NULL)
            break;
        throttle_lock(context);
        const void *known = atomic_load(&context->handle);
        if (known != NULL && (handle == NULL ? context->device == device : known == handle)) {
            batches_lose_events(context, fgpu_now());
            atomic_store(&context->handle, NULL);
        }
        throttle_unlock(context);
    }
}

/* ---- Lent compute ---- */

const struct lending *throttle_lending(struct context *context, uint64_t now) {
    if (context->lending.read_at == 0 || now >= context->lending.read_at + LENDING_READ_AGAIN_NS)
        fgpu_read_words(context->device, &context->lending, now);
    return &context->lending;
}

/* Once a period. A session that cannot write its word borrows nothing, and others may use its slots. */
static __attribute__((noinline)) void say_busy(struct context *context, uint64_t now) {
    context->said = fgpu_say_busy(context->device, now);
    if (!context->said)
        fgpu_log("lending", "that there is work cannot be said to the neighbours: this session gets its slots only");
    context->said_until = now - now % SLOTS_PERIOD_NS + SLOTS_PERIOD_NS;
}

/* The whole time from `from` to `to` is the session's own or lent to it. */
static bool is_granted(const struct context *context, uint64_t from, uint64_t to) {
    while (from < to) {
        struct lending_stretch stretch = lending_at(&context->lending, from, true);
        uint64_t end = stretch.end < to ? stretch.end : to;
        if (!stretch.lent && slots_entitled(context->slots, end) - slots_entitled(context->slots, from) < end - from)
            return false;
        from = end;
    }
    return true;
}

/* If the session's slots do not allow a launch, it may begin in lent time. That is known for 4 ms after the neighbours'
 * words were read: an owner that comes back waits no longer than that, and one kernel. A launch of unknown length, or
 * longer than any grant, may begin only while no other session has work. */
static struct gate_answer ask_for_loan(struct context *context, const struct kind *kind, const struct gate_state *state,
                                       uint64_t now, struct gate_answer answer) {
    const struct lending *lending = throttle_lending(context, now);
    uint64_t begins = state->free_at > now ? state->free_at : now, length = kind->expected;
    uint64_t until = answer.verdict == GATE_WAIT && answer.until < now + SLOTS_PERIOD_NS ? answer.until
                                                                                         : now + SLOTS_PERIOD_NS;
    if (gate_is_full(state, kind->expected) && state->sentinels > 0)
        return (struct gate_answer){.verdict = GATE_SENTINEL};
    if (begins >= lending->read_at + LENDING_GRANT_NS)
        return state->sentinels > 0 ? (struct gate_answer){.verdict = GATE_SENTINEL}
                                    : (struct gate_answer){GATE_WAIT, now + LENDING_READ_AGAIN_NS};
    bool alone = lending_alone(lending, now);
    if (length < kind->longest)
        length = kind->longest;
    if (alone || (kind->measured_at != 0 && length <= LENDING_GRANT_NS)) {
        struct lending_stretch stretch = lending_at(lending, begins, true);
        uint64_t needed = length < LENDING_OVER_NS ? 1 : length - LENDING_OVER_NS;
        if (stretch.lent && (alone || is_granted(context, begins, begins + needed)))
            return (struct gate_answer){.verdict = GATE_OPEN};
        until = lending_next(lending, stretch.lent ? stretch.end : begins, until);
    }
    return answer.verdict == GATE_SENTINEL ? answer : (struct gate_answer){GATE_WAIT, until};
}

/* ---- Stream capture ---- */

void fgpu_capture_begins(void) {
    atomic_fetch_add(&captures, 1);
}

void fgpu_capture_ends(void) {
    /* Never below zero: a beginning may have been missed, and its end seen. */
    int before = atomic_load(&captures);
    while (before > 0 && !atomic_compare_exchange_weak(&captures, &before, before - 1)) {
    }
}

/* In a captured stream nothing may be recorded or waited for: the launch only becomes part of a graph. An error means
 * that the stream cannot be asked because of another capture; the launch will return the same. */
static bool is_captured(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return DRIVER(cuStreamIsCapturing) != NULL && (DRIVER(cuStreamIsCapturing)(stream, &status) != CUDA_SUCCESS ||
                                                   status != CU_STREAM_CAPTURE_STATUS_NONE);
}

/* While any stream is captured, asking for events may break the capture unless the thread's mode allows it. `mode` is
 * the new mode, and becomes the old one. */
static void exchange_mode(CUstreamCaptureMode *mode) {
    if (DRIVER(cuThreadExchangeStreamCaptureMode) != NULL)
        DRIVER(cuThreadExchangeStreamCaptureMode)(mode);
}

/* ---- Launches ---- */

/* The state between fgpu_launch_begin() and fgpu_launch_end(), kept in the launch. */
struct pending {
    struct context *context;
    struct stream *stream;
    uint64_t added_at, expected;
    bool capture;
};

_Static_assert(sizeof(struct pending) <= sizeof((struct fgpu_launch){0}.private_words), "it fits");

/* NULL is one of two streams, and the thread's own differs in each thread. */
static CUstream stream_of(CUstream stream, bool per_thread, uint64_t *key) {
    if (stream == NULL)
        stream = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    *key = stream == CU_STREAM_PER_THREAD ? (uint64_t)(uintptr_t)&throttle_thread : (uint64_t)(uintptr_t)stream;
    return stream;
}

/* When the first sentinel should be done; or when to look again for a late one, or for one of a kind with varying
 * lengths, which may come early. */
static uint64_t look_again_at(const struct context *context, bool changes, uint64_t now) {
    uint64_t due = context->began_at + context->closed[0].expected;
    if (due > now + POLL_LEAST_NS && !changes)
        return due < now + SLOTS_PERIOD_NS ? due : now + SLOTS_PERIOD_NS;
    uint64_t from = changes ? context->began_at : due, pause = from < now ? (now - from) / 4 : 0;
    return now + (pause < POLL_LEAST_NS ? POLL_LEAST_NS : pause > POLL_MOST_NS ? POLL_MOST_NS : pause);
}

/* Work may wait for work that is launched after it (collective operations do), so its sentinels would never be done
 * while later launches wait here. A launch that has waited this long is let through, in its slot, if the account allows
 * it without the overdue work. It could also be a long kernel, so the patience doubles each time. */
static bool is_stuck(const struct context *context, uint64_t since, uint64_t now) {
    uint64_t patience = 4 * context->in_flight;
    return now - since > (patience > context->patience ? patience : context->patience);
}

/* The session's entitlement until now, like slots_entitled(), but computed once for a slot's launches. */
static __attribute__((noinline)) void find_slot(struct context *context, uint64_t now) {
    context->slot = slots_at(context->slots, now);
    context->entitled = slots_entitled(context->slots, context->slot.end);
}

static inline uint64_t entitled(struct context *context, uint64_t now) {
    if (__builtin_expect(now < context->slot.start || now >= context->slot.end, 0))
        find_slot(context, now);
    return context->entitled - (context->slot.end - (now < context->slot.start ? context->slot.start : now));
}

/* Whether the gate is open, as usual: what pass() would find at once, with nothing else due. */
static inline bool is_open(struct context *context, const struct kind *kind, uint64_t now) {
    uint64_t free_at = context->began_at + context->in_flight;
    if (now >= context->said_until || (context->closed_count > 0 && now > free_at) || kind->tried)
        return false;
    int64_t balance;
    if (!account_balance_now(context->account, context->slots, entitled(context, now), &balance))
        return false;
    struct gate_state state = {.balance = balance - (int64_t)context->in_open,
                               .in_flight = context->in_flight,
                               .free_at = free_at,
                               .sentinels = context->closed_count,
                               .longest = kind->longest};
    return gate_is_open(context->slot, now, kind->expected, &state);
}

/* Asks until the gate is open, with the lock held except during sleep. Returns the time. */
static __attribute__((noinline)) uint64_t pass(struct context *context, uint64_t stream_key, uint64_t key) {
    uint64_t since = 0, settled = context->settled;
    for (;;) {
        uint64_t now = fgpu_now();
        see_limits(context);
        if (__builtin_expect(now >= context->said_until, 0))
            say_busy(context, now);
        if (context->closed_count > 0 && now > context->began_at + context->in_flight) {
            batches_settle(context, now);
            batches_charge_overdue(context, now);
        }
        if (context->settled != settled || since == 0) {
            settled = context->settled;
            since = now;
        }
        int64_t balance = account_balance(context->account, context->slots, entitled(context, now));
        const struct kind *kind = batches_kind(context, key);
        struct gate_state state = {.balance = balance - (int64_t)context->in_open,
                                   .in_flight = context->in_flight,
                                   .free_at = context->began_at + context->in_flight,
                                   .sentinels = context->closed_count,
                                   .longest = kind->longest};
        bool stuck = is_stuck(context, since, now);
        if (stuck)
            state = (struct gate_state){.balance = balance + (int64_t)context->overdue};
        struct gate_answer answer = gate_ask(context->slots, context->slot, now, kind->expected, &state);
        if (answer.verdict != GATE_OPEN && context->said && !stuck)
            answer = ask_for_loan(context, kind, &state, now, answer);
        if (kind->tried && !stuck && context->closed_count > 0)
            answer.verdict = GATE_SENTINEL; /* a kind's first launch shows how long the others will take */
        if (answer.verdict == GATE_OPEN) {
            if (stuck) {
                context->let_through_at = now;
                context->patience *= context->patience < MOST_PATIENCE_NS ? 2 : 1;
            }
            return now;
        }
        struct stream *stream = answer.verdict == GATE_WAIT ? batches_find_stream(context, stream_key) : NULL;
        if (stream != NULL)
            batches_close(context, stream, now);
        batches_settle(context, now);
        if (context->settled != settled)
            continue;
        if (context->overdue > 0 && answer.until > now + SLOTS_PERIOD_NS)
            answer.until = now + SLOTS_PERIOD_NS; /* a neighbour may have been in the way: then less is owed soon */
        uint64_t until = answer.verdict == GATE_WAIT ? answer.until : look_again_at(context, kind->wary > 0, now);
        throttle_unlock(context);
        fgpu_sleep_until(until);
        throttle_lock(context);
    }
}

static __attribute__((noinline)) bool begin_captured(CUstream stream, CUstreamCaptureMode *mode) {
    if (is_captured(stream))
        return false;
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    exchange_mode(mode);
    return true;
}

void fgpu_launch_begin(struct fgpu_launch *launch) {
    struct pending *pending = (struct pending *)launch->private_words;
    launch->device = -1;
    launch->follow_up = false;
    if (__builtin_expect(!atomic_load_explicit(&limits_known, memory_order_acquire), 0))
        read_limits();
    struct context *context;
    if (atomic_load_explicit(&fgpu_unthrottled, memory_order_relaxed) || (context = current_context(true)) == NULL)
        return;
    uint64_t stream_key, key = (uint64_t)(uintptr_t)launch->kind;
    CUstream handle = stream_of(launch->stream, launch->per_thread, &stream_key);
    CUstreamCaptureMode mode;
    bool capture = atomic_load_explicit(&captures, memory_order_relaxed) > 0;
    if (__builtin_expect(capture, 0) && !begin_captured(handle, &mode))
        return;
    throttle_lock(context);
    see_limits(context);
    uint64_t now = fgpu_now();
    struct kind *kind = batches_kind(context, key);
    if (__builtin_expect(!is_open(context, kind, now), 0)) {
        now = pass(context, stream_key, key);
        kind = batches_kind(context, key);
    }
    struct stream *stream = batches_stream(context, stream_key, handle, now);
    *pending = (struct pending){context, stream, now, kind->expected, capture};
    launch->follow_up = batches_add(context, stream, kind, now);
    launch->device = context->device;
    throttle_unlock(context);
    if (__builtin_expect(capture, 0))
        exchange_mode(&mode);
}

void fgpu_launch_follow_up(const struct fgpu_launch *launch, int result) {
    const struct pending *pending = (const struct pending *)launch->private_words;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (pending->capture)
        exchange_mode(&mode);
    throttle_lock(pending->context);
    if (result == CUDA_SUCCESS)
        batches_launched(pending->context, pending->stream, pending->added_at);
    else
        batches_refused(pending->context, pending->stream, pending->expected);
    throttle_unlock(pending->context);
    if (pending->capture)
        exchange_mode(&mode);
}

/* Only the stream that is waited for certainly still exists. During a capture, other streams' events may be in the way.
 */
void fgpu_wait_begins(void *stream, bool per_thread) {
    struct context *context;
    if (!atomic_load_explicit(&limits_known, memory_order_acquire) ||
        atomic_load_explicit(&fgpu_unthrottled, memory_order_relaxed) ||
        atomic_load_explicit(&captures, memory_order_relaxed) > 0 || (context = current_context(false)) == NULL)
        return;
    uint64_t key;
    stream_of(stream, per_thread, &key);
    throttle_lock(context);
    struct stream *found = batches_find_stream(context, key);
    if (found != NULL)
        batches_close(context, found, fgpu_now());
    throttle_unlock(context);
}
