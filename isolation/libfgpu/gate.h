/* May this launch go ahead? A pure decision: times in, verdict out. throttle.c asks it and waits as it is told.
 *
 * The rules, for a launch that is expected to keep the device busy for E, in a slot of length S:
 *
 * 1. Inside the slot only: what is in flight is expected to be done before the slot's end, so that the launch begins in
 *    it.
 * 2. The account has to be good for half of it (of S, if E is longer): with all that is in flight paid, it may end up
 *    owing at most E / 2, and it is left with at most E / 2 that it could have used. What was used beyond the slot's end
 *    is missing in later slots, and what a slot's end was too short for is added to later ones: this rounding is what
 *    makes the share exact for kernels that do not fit their slots evenly.
 * 3. At most two sentinels are waited for, or GATE_IN_FLIGHT_NS of work.
 * 4. What is longer than its slot, or may be, begins in the slot's first part, so as to disturb as little as it can.
 *
 * The bound. Let a session always have work, of kernels of length E at most, with the share s of the device (0 < s < 1),
 * period P, c = sP the most that the account keeps, and N processes that launch at the same time. Between any two
 * moments T apart the device is busy with its work for at most
 *
 *     sT + (1 - s)sP + c + NE + F
 *
 * (sT + (1-s)sP is the most slot time that an interval of T can contain; F = GATE_IN_FLIGHT_NS is what may be in flight
 * with wrong expectations), and for at least sT - (1 - s)sP - c - NE - L if nobody else's work was in its slots, where L
 * is what the host's lateness in waking it up wasted (beyond what the account makes up for). So over T the share is off by
 * at most (NE + 2sP + F) / T, and in the long run by nothing.
 *
 * Lengths that cannot be foretold. That of a kind's first launch is not known, nor those of a kind whose launches take
 * now short, now long. Until the first long one has ended, more are in flight than the account would allow; let it be U
 * launches of length E that were made as if they were short, and k more that were let through because they waited in
 * vain (throttle.c), after P, 2P, 4P, ... So the bound has
 *
 *     N (U + k) E in place of NE, with k <= log2(1 + E / P)
 *
 * U is 1 for a kind's first launch. Of a kind that is known to change, GATE_MOST_SENTINELS launches are in flight at most,
 * each with a sentinel of its own; U is how many of them are long. Of one that is not yet known to, it is what fits
 * GATE_IN_FLIGHT_NS as expected: once. All of this is paid for when it has ended, or earlier: what is in flight for longer
 * than expected is charged while it runs. So in the long run the share is off by nothing here too, unless more than
 * ACCOUNT_MOST_OWED_NS is owed at once.
 *
 * A neighbour with kernels of length E' begins its last one
 * inside its own slot and may be in the way for E' at most, which its own account then has to make good. */
#ifndef FGPU_GATE_H
#define FGPU_GATE_H

#include "slots.h"

#define GATE_IN_FLIGHT_NS UINT64_C(4000000)
#define GATE_SENTINELS 2
#define GATE_MOST_SENTINELS 30 /* of many streams with little work each */

struct gate_state {
    int64_t balance;    /* of the account now, with all that is in flight paid as expected */
    uint64_t in_flight; /* the expected length of what is */
    uint64_t free_at;   /* when it is expected to be done; anything up to now: nothing is in the way */
    unsigned sentinels; /* that are not done yet */
    uint64_t longest;   /* what this launch may take although it is not expected to; 0: nothing known */
};

enum gate_verdict {
    GATE_OPEN,
    GATE_WAIT,     /* until `until`, the beginning of a slot */
    GATE_SENTINEL, /* until one of the sentinels is done */
};

struct gate_answer {
    enum gate_verdict verdict;
    uint64_t until;
};

/* As much is in flight as may be. */
static inline bool gate_is_full(const struct gate_state *state, uint64_t expected) {
    return (state->sentinels >= GATE_SENTINELS && state->in_flight + expected > GATE_IN_FLIGHT_NS) ||
           state->sentinels >= GATE_MOST_SENTINELS;
}

/* Rule 2: what the account has to be good for, at the slot's end. */
static inline int64_t gate_needs(uint64_t expected, struct slot slot) {
    uint64_t length = slot.end - slot.start;
    return (int64_t)((expected < length ? expected : length) / 2);
}

/* The usual case of gate_ask() alone, for each launch: open, of a length that the slot has. */
static inline bool gate_is_open(struct slot slot, uint64_t now, uint64_t expected, const struct gate_state *state) {
    uint64_t longest = expected > state->longest ? expected : state->longest;
    return now >= slot.start && longest <= slot.end - slot.start && state->free_at < slot.end &&
           state->balance + (int64_t)(slot.end - now) >= gate_needs(expected, slot) && !gate_is_full(state, expected);
}

/* `slot` is that of now. */
struct gate_answer gate_ask(const struct slots *slots, struct slot slot, uint64_t now, uint64_t expected,
                            const struct gate_state *state);

#endif
