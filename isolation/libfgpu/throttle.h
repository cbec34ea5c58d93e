/* Shared by throttle.c and the files below it: the state of a CUDA context on a device with a compute limit. */
#ifndef FGPU_THROTTLE_H
#define FGPU_THROTTLE_H

#include "lending.h"
#include "sentinel.h"
#include "slots.h"

#include <stdatomic.h>

#define THROTTLE_BATCH_NS UINT64_C(1000000) /* the work between two sentinels */
#define THROTTLE_BATCH_LAUNCHES 512
#define THROTTLE_PATIENCE_NS SLOTS_PERIOD_NS
#define THROTTLE_CLOSED 64 /* GATE_MOST_SENTINELS, and those that were let through */
#define THROTTLE_STREAMS 64
#define THROTTLE_KINDS 1024 /* a power of two */

/* How long a launch of this kind keeps the device busy. */
struct kind {
    uint64_t key;
    uint64_t expected;    /* ns */
    uint64_t measured_at; /* 0: never */
    bool tried;           /* its first launch is in flight */
    unsigned wary; /* this number of further launches is measured one by one, as one took far longer than expected */
    uint64_t longest; /* length of that one in ns; 0: none */
    uint64_t round; /* when it was last corrected together with other kinds */
};

/* Consecutive launches into one stream, and the events around them. */
struct batch {
    struct sentinel start, end; /* no start: it begins when the previous one in the stream ends */
    unsigned launches;
    unsigned stream; /* index */
    uint64_t first_at, expected;
    uint64_t deposit;  /* paid in advance: of closed batches */
    uint64_t delay; /* the host may have caused this much of the time between the events */
    struct kind *kind; /* NULL: of several */
    uint64_t key;      /* its key: the entry may have become another kind's */
    bool known;        /* all its kinds have been measured before */
    bool full; /* to be closed after the current launch */
};

struct stream {
    uint64_t key; /* 0: free */
    CUstream handle;
    struct batch open;
    unsigned closed; /* number of its batches that are not settled */
    uint64_t in_flight; /* the sum of `expected` of its batches */
    uint64_t last_launch, last_end;
    unsigned doubts; /* how often expectation decided the payment, as the host had paused before the measurement */
    unsigned watch; /* this number of further launches is measured one by one, to check the expectation */
};

/* A launch takes and releases its context's lock, and an atomic instruction would be up to a third of a launch's cost.
 * So the thread that launched first, the owner, holds the lock with plain stores (`here`) while it is `favoured`. Any
 * other thread takes `taken` and ends the favour (lock.c), which takes microseconds. So the owner regains it only after
 * many launches in a row. */
struct lock {
    _Atomic(int) taken;
    _Atomic(int) here; /* written by the owner alone */
    _Atomic(bool) favoured;
    const void *owner; /* that thread's own byte, for the life of this struct */
    bool favours;      /* the system can end a favour at once */
    unsigned in_row; /* how often the owner took it since another thread did */
};

/* Guarded by `lock`, which is never held while waiting. */
struct context {
    _Atomic(void *) handle; /* NULL: free */
    struct lock lock;
    /* From here on everything is reset for each context. */
    struct sentinels sentinels;
    int device;
    struct fgpu_time_account *account;
    const _Atomic(uint64_t) *revision; /* in force; and the one that the slots are from */
    uint64_t seen_revision;
    const struct slots *slots;        /* those below */
    struct slots slots_held;
    struct slot slot; /* the last one that was asked for */
    uint64_t entitled; /* at its end */
    struct lending lending;
    uint64_t said_until; /* until then its word need not be renewed */
    bool said; /* the last write of its word succeeded */
    struct batch closed[THROTTLE_CLOSED]; /* in the order in which they were closed */
    unsigned closed_count;
    uint64_t settled;       /* counts */
    uint64_t behind_until; /* when the device was last busy with other sessions' work */
    uint64_t overdue;       /* of deposits: what was charged beyond expectation */
    uint64_t patience; /* how long the next launch waits in vain */
    uint64_t let_through_at; /* when one was let through after that; 0: none since a sentinel was done */
    uint64_t in_flight;     /* the sum of `expected` of all batches, open and closed */
    uint64_t in_open;       /* of the open ones */
    uint64_t began_at; /* when the work in flight began, if known */
    uint64_t round, round_expected, round_length; /* batches.c: of all streams together */
    int error_permille;                           /* of the last round's expectations */
    struct stream streams[THROTTLE_STREAMS];
    struct kind kinds[THROTTLE_KINDS];
};

extern _Thread_local char throttle_thread __attribute__((tls_model("initial-exec"))); /* its address is a thread's own */

void throttle_begin_lock(struct lock *lock);
void throttle_lock_slowly(struct lock *lock);

static inline void throttle_lock(struct context *context) {
    struct lock *lock = &context->lock;
    if (__builtin_expect(lock->owner == &throttle_thread, 1)) {
        atomic_store_explicit(&lock->here, 1, memory_order_relaxed);
        atomic_signal_fence(memory_order_seq_cst); /* the thread that ends the favour does the other half */
        if (__builtin_expect(atomic_load_explicit(&lock->favoured, memory_order_acquire), 1))
            return;
        atomic_store_explicit(&lock->here, 0, memory_order_release);
    }
    throttle_lock_slowly(lock);
}

/* Plain stores wake no one: a waiting thread looks again soon. Waiting is rare, as the lock is held for nanoseconds. */
static inline void throttle_unlock(struct context *context) {
    struct lock *lock = &context->lock;
    bool here = lock->owner == &throttle_thread && atomic_load_explicit(&lock->here, memory_order_relaxed) != 0;
    atomic_store_explicit(here ? &lock->here : &lock->taken, 0, memory_order_release);
}

/* The neighbours' words, at most a millisecond old. */
const struct lending *throttle_lending(struct context *context, uint64_t now);

/* ---- batches.c: all with the context's lock held, while it is the current one ------------------------ */

struct stream *batches_other_stream(struct context *context, uint64_t key, CUstream handle, uint64_t now);
struct stream *batches_find_stream(struct context *context, uint64_t key); /* NULL: it has none */
struct kind *batches_other_kind(struct context *context, uint64_t key);

/* The stream's entry, new or existing. */
static inline struct stream *batches_stream(struct context *context, uint64_t key, CUstream handle, uint64_t now) {
    struct stream *first = &context->streams[0];
    return __builtin_expect(first->key == key, 1) ? first : batches_other_stream(context, key, handle, now);
}

static inline size_t batches_place(uint64_t key) {
    return (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 40) % THROTTLE_KINDS;
}

/* The entry of this kind, new or existing. It stays the kind's while the lock is held. */
static inline struct kind *batches_kind(struct context *context, uint64_t key) {
    struct kind *first = &context->kinds[batches_place(key)];
    return __builtin_expect(first->key == key, 1) ? first : batches_other_kind(context, key);
}

/* The program waits, or is made to wait: ends the stream's open batch with a sentinel now, as the next launch may come
 * long after it is done. */
void batches_close(struct context *context, struct stream *stream, uint64_t now);

/* Settles finished batches: pays for them and learns their lengths. */
void batches_settle(struct context *context, uint64_t now);

/* Charges work in flight for longer than expected, so that the account knows of it before it is done. */
void batches_charge_overdue(struct context *context, uint64_t now);

/* Adds a launch to the stream's open batch, or opens one. True if batches_launched() must be called after the launch.
 */
bool batches_add(struct context *context, struct stream *stream, struct kind *kind, uint64_t now);

/* The driver has taken the launch that was added at the time `added_at`. */
void batches_launched(struct context *context, struct stream *stream, uint64_t added_at);

/* The driver has refused it. */
void batches_refused(struct context *context, struct stream *stream, uint64_t expected);

/* The context's events are gone: settles everything by expectation. */
void batches_lose_events(struct context *context, uint64_t now);

#endif
