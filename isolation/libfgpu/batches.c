/* Batches of launches: what is in flight, how long it took, how long it will. */
#include "throttle.h"

#include "account.h"
#include "clock.h"

#include <string.h>

#define IDLE_NS UINT64_C(200000)         /* a stream without launches for so long has a new batch next */
#define MEASURE_AGAIN_NS UINT64_C(1000000000)
#define FORGOTTEN_NS UINT64_C(20000000)  /* an open batch without launches for so long is done */
#define LATE_NS UINT64_C(50000)          /* between launch and event: the host had something else to do */
#define PROBES 8
#define ONE_BY_ONE 512  /* launches that are measured so after a surprise, or a doubt */
#define SAMPLE 8        /* of so many doubts one is looked into */
#define SURPRISE_NS UINT64_C(200000)
#define HELPED_NS (SLOTS_PERIOD_NS / 10) /* what ends so soon after a launch was let through had waited for it */

/* ---- Kinds of work ---- */

struct kind *batches_other_kind(struct context *context, uint64_t key) {
    size_t place = batches_place(key);
    struct kind *oldest = NULL;
    for (size_t n = 0; n < PROBES; n++) {
        struct kind *kind = &context->kinds[(place + n) % THROTTLE_KINDS];
        if (kind->key == key)
            return kind;
        if (oldest == NULL || kind->measured_at < oldest->measured_at)
            oldest = kind;
    }
    *oldest = (struct kind){.key = key, .expected = THROTTLE_BATCH_NS};
    return oldest;
}

/* How long one launch of a batch took, to the kind that all its launches are of. Down faster than up: one too short
 * costs an overrun, which is paid for; one too long wastes the ends of slots. Where a neighbour may have had the device
 * for a part of the time (`shared`), up even more slowly. */
static void learn_alone(struct kind *kind, uint64_t length, bool shared) {
    int64_t error = (int64_t)(length - kind->expected);
    if (kind->measured_at == 0)
        kind->expected = length;
    else
        kind->expected += (uint64_t)(error / (error < 0 ? 2 : shared ? 16 : 4));
}

/* Where streams share the device, a batch has others' work between its events, and its own length cannot be told. What
 * can be told is how long all of them took together, and how long they were expected to: by half of what these differ,
 * the kinds of such batches are corrected, once for each some milliseconds of work. */
static void learn_together(const struct context *context, struct kind *kind) {
    if (kind->round != context->round)
        kind->expected += (uint64_t)((int64_t)kind->expected * context->error_permille / 2000);
    kind->round = context->round;
}

static void add_to_round(struct context *context, uint64_t expected, uint64_t length) {
    context->round_expected += expected;
    context->round_length += length;
    if (context->round_expected + context->round_length < 8 * THROTTLE_BATCH_NS)
        return;
    uint64_t permille = context->round_expected == 0 ? 2000 : 1000 * context->round_length / context->round_expected;
    context->error_permille = (int)(permille > 2000 ? 2000 : permille) - 1000;
    context->round_expected = context->round_length = 0;
    context->round++;
}

/* A launch that takes so much longer than expected is not the last of its kind. What was outside the slots, a neighbour
 * may have taken. */
static void be_wary(struct kind *kind, const struct batch *batch, uint64_t length, uint64_t outside) {
    if (length > outside + 2 * batch->expected + SURPRISE_NS) {
        kind->wary = ONE_BY_ONE;
        kind->longest = length;
    } else if (kind->wary > 0 && --kind->wary == 0) {
        kind->longest = 0;
    }
}

static void learn(struct context *context, struct batch *batch, uint64_t start, uint64_t end, uint64_t outside,
                  bool shared, uint64_t now) {
    struct kind *kind = batch->kind;
    uint64_t from = start < context->began_at ? context->began_at : start; /* no other batch's time twice */
    uint64_t length = end > from ? end - from : 0;
    add_to_round(context, batch->expected, length);
    if (kind == NULL || kind->key != batch->key)
        return;
    if (batch->known)
        be_wary(kind, batch, length, outside);
    if (kind->measured_at != 0 && context->in_flight > context->streams[batch->stream].in_flight)
        learn_together(context, kind);
    else
        learn_alone(kind, length / batch->launches, shared);
    kind->measured_at = now;
}

/* ---- Settling ---- */

static void subtract(uint64_t *from, uint64_t what) {
    *from -= what < *from ? what : *from;
}

/* How much of this time was the session's: its slots, and what it was lent. */
static uint64_t rightful(struct context *context, uint64_t start, uint64_t end, uint64_t now) {
    uint64_t own = slots_entitled(context->slots, end) - slots_entitled(context->slots, start);
    if (context->lending.own == 0 || own >= end - start)
        return own;
    for (const struct lending *lending = throttle_lending(context, now); start < end;) {
        struct lending_stretch stretch = lending_at(lending, start, false);
        uint64_t to = stretch.end < end ? stretch.end : end;
        own += stretch.lent ? to - start : 0;
        start = to;
    }
    return own;
}

/* What was lent is not held against it. */
static void charge(struct context *context, uint64_t start, uint64_t end, uint64_t now, uint64_t deposit) {
    uint64_t from = start;
    if (context->lending.own == 0 || start >= end ||
        slots_entitled(context->slots, end) - slots_entitled(context->slots, start) >= end - start) {
        account_pay(context->account, start, end, now, deposit);
        return;
    }
    for (const struct lending *lending = throttle_lending(context, now); from < end;) {
        struct lending_stretch stretch = lending_at(lending, from, false);
        uint64_t to = stretch.end < end ? stretch.end : end;
        if (stretch.lent)
            account_was_lent(context->account, from, to, now);
        else
            account_pay(context->account, from, to, now, 0);
        from = to;
    }
    account_pay(context->account, end, end, now, deposit);
}

static void pay(struct context *context, struct batch *batch, uint64_t start, uint64_t end, uint64_t now) {
    struct stream *stream = &context->streams[batch->stream];
    charge(context, start, end, now, batch->deposit + context->overdue);
    context->overdue = 0;
    if (stream->last_end < end)
        stream->last_end = end;
    if (context->began_at < end)
        context->began_at = end;
    subtract(&context->in_flight, batch->expected);
    subtract(&stream->in_flight, batch->expected);
    if (batch->kind != NULL && batch->kind->key == batch->key)
        batch->kind->tried = false;
    context->settled++;
    sentinel_drop(&context->sentinels, &batch->start);
    sentinel_drop(&context->sentinels, &batch->end);
    batch->launches = 0;
}

/* Without its events: it took as long as expected, from when it could begin. */
static void abandon(struct context *context, struct batch *batch, uint64_t now) {
    uint64_t start = context->streams[batch->stream].last_end, end;
    if (start < batch->first_at)
        start = batch->first_at;
    end = start + batch->expected < now ? start + batch->expected : now;
    pay(context, batch, start < end ? start : end, end, now);
}

/* Expectation was taken for truth. Whether it is, measuring tells, now and then: each launch by itself costs an event. */
static void doubt(struct stream *stream) {
    if (stream->doubts++ % SAMPLE == 0)
        stream->watch = ONE_BY_ONE;
}

static void abandon_open(struct context *context, struct stream *stream, uint64_t now) {
    doubt(stream);
    subtract(&context->in_open, stream->open.expected);
    abandon(context, &stream->open, now);
}

/* A length of which so much is doubtful: that is left out as far as the rest is not less than expected. */
static uint64_t less_doubt(uint64_t length, uint64_t doubtful, uint64_t expected) {
    uint64_t least = length > doubtful ? length - doubtful : 0;
    return length <= expected ? length : least > expected ? least : expected;
}

/* When its own work began. What had waited for a launch that was let through here did so until then: it is no long
 * kernel, and the next one need not wait as long. */
static uint64_t started(struct context *context, uint64_t start, uint64_t end) {
    uint64_t let_through_at = context->let_through_at;
    bool helped = start < let_through_at && let_through_at <= end && end - let_through_at < HELPED_NS;
    if (let_through_at != 0)
        context->patience = helped ? THROTTLE_PATIENCE_NS / 16 : THROTTLE_PATIENCE_NS;
    return helped ? let_through_at : start;
}

static void settle(struct context *context, struct batch *batch, uint64_t now) {
    uint64_t start, end;
    bool known = true;
    if (batch->start.event != NULL) {
        known = sentinel_when(&context->sentinels, &batch->start, now, &start);
    } else {
        start = context->streams[batch->stream].last_end;
        if (start < batch->first_at) /* nothing was known of the stream's last batch */
            start = batch->first_at;
    }
    if (!known || !sentinel_when(&context->sentinels, &batch->end, now, &end)) {
        abandon(context, batch, now);
        return;
    }
    uint64_t length = end > start ? end - start : 0;
    uint64_t in_slots = length == 0 ? 0 : rightful(context, start, end, now);
    uint64_t outside = length > in_slots ? length - in_slots : 0;
    /* Where the host was late between event and launch, the device may have been idle: then expectation decides. */
    uint64_t least = less_doubt(length, batch->delay, batch->expected);
    if (least < length / 2 && batch->launches > 1)
        doubt(&context->streams[batch->stream]);
    length = least;
    /* What ran over its slot's end may have shared the device with a neighbour, each for half of the time. So it decides
     * there too, unless it is wrong: that work takes more than twice as long, no neighbour explains. */
    bool shared = outside > 0 && batch->known && length < 2 * batch->expected;
    learn(context, batch, started(context, end - length, end), end, outside, shared, now);
    if (shared)
        length = less_doubt(length, outside / 2, batch->expected);
    pay(context, batch, end - length, end, now);
}

void batches_settle(struct context *context, uint64_t now) {
    unsigned kept = 0;
    for (unsigned n = 0; n < context->closed_count; n++) {
        struct batch *batch = &context->closed[n];
        enum sentinel_state state = sentinel_ask(&batch->end);
        if (state == SENTINEL_LOST && now < batch->first_at + batch->expected)
            state = SENTINEL_PENDING;
        if (state == SENTINEL_PENDING) {
            context->closed[kept++] = *batch;
            continue;
        }
        context->streams[batch->stream].closed--;
        if (state == SENTINEL_DONE) {
            settle(context, batch, now);
            context->let_through_at = 0;
        } else {
            abandon(context, batch, now);
        }
    }
    context->closed_count = kept;
    for (unsigned n = 0; n < THROTTLE_STREAMS; n++) {
        struct stream *stream = &context->streams[n];
        if (stream->open.launches > 0 && stream->closed == 0 && now > stream->last_launch + FORGOTTEN_NS)
            abandon_open(context, stream, now);
    }
}

void batches_charge_overdue(struct context *context, uint64_t now) {
    if (context->closed_count == 0)
        return;
    if (context->closed[0].start.event != NULL && sentinel_ask(&context->closed[0].start) == SENTINEL_PENDING)
        context->behind_until = now;
    uint64_t began_at = context->behind_until > context->began_at ? context->behind_until : context->began_at;
    uint64_t expected = began_at + context->in_flight + context->overdue;
    if (now <= expected)
        return;
    account_deposit(context->account, now - expected);
    context->overdue += now - expected;
}

void batches_lose_events(struct context *context, uint64_t now) {
    context->sentinels = (struct sentinels){0};
    for (unsigned n = 0; n < context->closed_count; n++) {
        context->closed[n].start.event = context->closed[n].end.event = NULL;
        abandon(context, &context->closed[n], now);
    }
    context->closed_count = 0;
    for (unsigned n = 0; n < THROTTLE_STREAMS; n++) {
        context->streams[n].open.start.event = NULL;
        if (context->streams[n].open.launches > 0)
            abandon_open(context, &context->streams[n], now);
    }
}

/* ---- Launching ---- */

struct stream *batches_find_stream(struct context *context, uint64_t key) {
    for (unsigned n = 0; n < THROTTLE_STREAMS; n++)
        if (context->streams[n].key == key)
            return &context->streams[n];
    return NULL;
}

struct stream *batches_other_stream(struct context *context, uint64_t key, CUstream handle, uint64_t now) {
    struct stream *oldest = NULL;
    for (unsigned n = 0; n < THROTTLE_STREAMS; n++) {
        struct stream *stream = &context->streams[n];
        if (stream->key == key)
            return stream;
        if (stream->closed == 0 && (oldest == NULL || stream->last_launch < oldest->last_launch))
            oldest = stream;
    }
    if (oldest == NULL) /* so many streams, all with work: two share a place */
        return &context->streams[0];
    if (oldest->open.launches > 0)
        abandon_open(context, oldest, now);
    *oldest = (struct stream){.key = key, .handle = handle};
    return oldest;
}

static void close_batch(struct context *context, struct stream *stream) {
    if (context->closed_count == THROTTLE_CLOSED) { /* only after launches that had waited long enough */
        context->streams[context->closed[0].stream].closed--;
        abandon(context, &context->closed[0], fgpu_now());
        memmove(context->closed, context->closed + 1, sizeof *context->closed * --context->closed_count);
    }
    sentinel_record(&context->sentinels, &stream->open.end, stream->handle);
    subtract(&context->in_open, stream->open.expected);
    stream->open.deposit = stream->open.expected;
    account_deposit(context->account, stream->open.deposit);
    context->closed[context->closed_count++] = stream->open;
    stream->closed++;
    stream->open.launches = 0;
}

void batches_close(struct context *context, struct stream *stream, uint64_t now) {
    if (stream->open.launches == 0)
        return;
    if (now > stream->last_launch + LATE_NS)
        stream->open.delay += now - stream->last_launch;
    close_batch(context, stream);
}

/* The stream is idle, so the device may be at somebody else's work: an event says when it comes to ours. */
static void open_batch(struct context *context, struct stream *stream, struct kind *kind, uint64_t now) {
    batches_settle(context, now);
    stream->open = (struct batch){.stream = (unsigned)(stream - context->streams), .first_at = now, .kind = kind,
                                  .key = kind->key, .known = true};
    if (stream->closed == 0)
        sentinel_record(&context->sentinels, &stream->open.start, stream->handle);
}

/* True if the batch is to be closed after this launch. */
static inline bool count_launch(struct context *context, struct stream *stream, struct kind *kind, uint64_t now, bool full) {
    struct batch *open = &stream->open;
    if (context->in_flight == 0 && context->began_at < now)
        context->began_at = now;
    stream->last_launch = now;
    open->launches++;
    open->known &= kind->measured_at != 0;
    kind->tried = kind->measured_at == 0;
    open->expected += kind->expected;
    context->in_flight += kind->expected;
    stream->in_flight += kind->expected;
    context->in_open += kind->expected;
    /* Launches that come one at a time are measured one at a time: then expectation need not be right. */
    full |= kind->wary > 0 || stream->watch > 0;
    if (stream->watch > 0)
        stream->watch--;
    open->full |= full || context->in_open >= THROTTLE_BATCH_NS || open->launches >= THROTTLE_BATCH_LAUNCHES;
    return open->full;
}

/* A launch that may not join those before it. */
static __attribute__((noinline)) bool add_apart(struct context *context, struct stream *stream, struct kind *kind,
                                                uint64_t now, bool paused, bool alone) {
    struct batch *open = &stream->open;
    if (paused)
        batches_close(context, stream, now);
    else if (open->launches > 0)
        close_batch(context, stream);
    open_batch(context, stream, kind, now);
    count_launch(context, stream, kind, now, paused || alone);
    return true;
}

bool batches_add(struct context *context, struct stream *stream, struct kind *kind, uint64_t now) {
    struct batch *open = &stream->open;
    bool paused = now > stream->last_launch + IDLE_NS && now > context->began_at + context->in_flight + IDLE_NS;
    bool alone = kind->measured_at == 0 || now > kind->measured_at + MEASURE_AGAIN_NS || stream->last_launch == 0;
    if (__builtin_expect(paused || alone || open->launches == 0, 0))
        return add_apart(context, stream, kind, now, paused, alone);
    if (open->kind != kind)
        open->kind = NULL;
    return count_launch(context, stream, kind, now, false);
}

void batches_launched(struct context *context, struct stream *stream, uint64_t added_at) {
    struct batch *open = &stream->open;
    if (open->launches == 0) /* another thread has closed it meanwhile */
        return;
    uint64_t late = fgpu_now() - added_at;
    if (open->start.event != NULL && open->launches == 1)
        open->delay = late;
    else if (late > LATE_NS)
        open->delay += late;
    if (open->full)
        close_batch(context, stream);
}

void batches_refused(struct context *context, struct stream *stream, uint64_t expected) {
    struct batch *open = &stream->open;
    if (open->launches == 0)
        return;
    subtract(&open->expected, expected);
    subtract(&context->in_flight, expected);
    subtract(&stream->in_flight, expected);
    subtract(&context->in_open, expected);
    if (open->kind != NULL)
        open->kind->tried = false;
    if (--open->launches == 0)
        sentinel_drop(&context->sentinels, &open->start);
}
