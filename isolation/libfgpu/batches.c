/* Batches of launches: the work in flight, how long it took, and how long it will take. */
#include "throttle.h"

#include "account.h"
#include "clock.h"

#include <string.h>

#define IDLE_NS UINT64_C(200000) /* after this time without launches a stream gets a new batch */
#define MEASURE_AGAIN_NS UINT64_C(1000000000)
#define FORGOTTEN_NS UINT64_C(20000000) /* an open batch without launches for this time is done */
#define LATE_NS UINT64_C(50000) /* between launch and event: the host was delayed */
#define PROBES 8
#define ONE_BY_ONE 512 /* number of launches measured one by one after a surprise or a doubt */
#define SAMPLE 8 /* one in this many doubts is examined */
#define SLICE_NS UINT64_C(2000000) /* for which a GPU serves one process where several have work */
#define SURPRISE_NS UINT64_C(200000)
#define HELPED_NS (SLOTS_PERIOD_NS / 10) /* work that ends this soon after a launch was let through had waited for it */

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

/* Learns the length of one launch from a batch of a single kind. Down faster than up: too short an expectation costs an
 * overrun, which is paid for; too long a one wastes the ends of slots. Where a neighbour may have used the device for
 * part of the time (`shared`), up even more slowly. */
static void learn_alone(struct kind *kind, uint64_t length, bool shared) {
    int64_t error = (int64_t)(length - kind->expected);
    if (kind->measured_at == 0)
        kind->expected = length;
    else
        kind->expected += (uint64_t)(error / (error < 0 ? 2 : shared ? 16 : 4));
}

/* If streams share the device, a batch has other streams' work between its events, so its own length is unknown. Known
 * is how long all of them took together, and were expected to take: half of the difference corrects the kinds of such
 * batches, once for each in some milliseconds of work. */
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

/* If a launch takes this much longer than expected, more of its kind will follow. Time outside the slots may have been
 * a neighbour's. */
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
    uint64_t from = start < context->began_at ? context->began_at : start; /* time of other batches only counts once */
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

/* How much of this time was the session's own: its slots, and what it was lent. */
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

/* Charges the time; lent time is free. */
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

/* A batch without events took as long as expected, from when it could begin. */
static void abandon(struct context *context, struct batch *batch, uint64_t now) {
    uint64_t start = context->streams[batch->stream].last_end, end;
    if (start < batch->first_at)
        start = batch->first_at;
    end = start + batch->expected < now ? start + batch->expected : now;
    pay(context, batch, start < end ? start : end, end, now);
}

/* Expectation decided a payment. Now and then it is checked by measuring, since each single measurement costs an event.
 */
static void doubt(struct stream *stream) {
    if (stream->doubts++ % SAMPLE == 0)
        stream->watch = ONE_BY_ONE;
}

static void abandon_open(struct context *context, struct stream *stream, uint64_t now) {
    doubt(stream);
    subtract(&context->in_open, stream->open.expected);
    abandon(context, &stream->open, now);
}

/* A length without its doubtful part, but not less than expected. */
static uint64_t less_doubt(uint64_t length, uint64_t doubtful, uint64_t expected) {
    uint64_t least = length > doubtful ? length - doubtful : 0;
    return length <= expected ? length : least > expected ? least : expected;
}

/* When its own work began. Work that waited for a launch that was let through here did so until then: it is no long
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
        if (start < batch->first_at) /* the end of the stream's last batch is unknown */
            start = batch->first_at;
    }
    if (!known || !sentinel_when(&context->sentinels, &batch->end, now, &end)) {
        abandon(context, batch, now);
        return;
    }
    uint64_t length = end > start ? end - start : 0;
    uint64_t in_slots = length == 0 ? 0 : rightful(context, start, end, now);
    uint64_t outside = length > in_slots ? length - in_slots : 0;
    /* If the host was late between event and launch, the device may have been idle: then expectation decides. */
    uint64_t least = less_doubt(length, batch->delay, batch->expected);
    if (least < length / 2 && batch->launches > 1)
        doubt(&context->streams[batch->stream]);
    length = least;
    /* Work beyond its slot's end may have shared the device with a neighbour, each for half of the time. So expectation
     * decides there too, unless it is wrong: a neighbour cannot more than double the time. Lent times end every few
     * milliseconds, and what is left of a kernel then may wait for a whole slice of the neighbour. Work that began in its
     * own slot is charged for that, as a share has to be exact where nothing is lent. */
    bool own = slots_entitled(context->slots, start + 1) > slots_entitled(context->slots, start);
    uint64_t slice = context->lending.own != 0 && !own ? SLICE_NS : 0;
    uint64_t doubtful = outside / 2 > slice ? outside / 2 : outside < slice ? outside : slice;
    bool shared = outside > 0 && batch->known && length < 2 * batch->expected + slice;
    learn(context, batch, started(context, end - length, end), end, outside, shared, now);
    if (shared)
        length = less_doubt(length, doubtful, batch->expected);
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
    if (oldest == NULL) /* too many streams with work: two share an entry */
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

/* The stream is idle, so the device may be busy with other work: an event records when it reaches ours. */
static void open_batch(struct context *context, struct stream *stream, struct kind *kind, uint64_t now) {
    batches_settle(context, now);
    stream->open = (struct batch){.stream = (unsigned)(stream - context->streams), .first_at = now, .kind = kind,
                                  .key = kind->key, .known = true};
    if (stream->closed == 0)
        sentinel_record(&context->sentinels, &stream->open.start, stream->handle);
}

/* True if the batch must be closed after this launch. */
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
    /* Launches that come one at a time are measured one at a time, so expectation need not be right. */
    full |= kind->wary > 0 || stream->watch > 0;
    if (stream->watch > 0)
        stream->watch--;
    open->full |= full || context->in_open >= THROTTLE_BATCH_NS || open->launches >= THROTTLE_BATCH_LAUNCHES;
    return open->full;
}

/* A launch that must not join the ones before it. */
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
    if (open->launches == 0) /* another thread has closed it in between */
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
