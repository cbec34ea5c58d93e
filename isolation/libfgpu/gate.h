/* Decides whether a launch may go ahead. Pure: times in, verdict out. throttle.c asks and waits accordingly.
 *
 * The rules, for a launch that is expected to keep the device busy for E, in a slot of length S:
 *
 * 1. Only inside the slot: the work in flight must be expected to end before the slot's end, so that the launch begins
 *    in it.
 * 2. The account must cover half of it (half of S, if E is longer): with all work in flight paid, at most E / 2 is owed
 *    after it, and at most E / 2 of usable time is left. Time used beyond the slot's end is missing in later slots, and
 *    time at a slot's end that was too short is added to later ones. This rounding makes the share exact for kernels
 *    that do not fit their slots evenly.
 * 3. At most two sentinels are waited for, or GATE_IN_FLIGHT_NS of work.
 * 4. Work that is, or may be, longer than its slot begins in the slot's first part, to disturb as little as possible.
 *
 * The bound. Let a session always have work, in kernels of length E at most, with the share s of the device (0 < s <
 * 1), period P, c = sP the most that the account keeps, and N processes that launch at the same time. In any interval T
 * the device is busy with its work for at most
 *
 *     sT + (1 - s)sP + c + NE + F
 *
 * (sT + (1-s)sP is the most slot time that an interval T can contain; F = GATE_IN_FLIGHT_NS is what may be in flight
 * with wrong expectations), and for at least sT - (1 - s)sP - c - NE - L if its slots had no other session's work,
 * where L is what the host's late wake-ups wasted (beyond what the account makes up for). So over T the share is off by
 * at most (NE + 2sP + F) / T, and in the long run by nothing.
 *
 * Unpredictable lengths. The length of a kind's first launch is unknown, and so are those of a kind with both short and
 * long launches. Until the first long one has ended, more are in flight than the account would allow. Let U be the
 * number of launches of length E that were made as if they were short, and k the number of further ones that were let
 * through because they waited in vain (throttle.c), after P, 2P, 4P, ... Then the bound has
 *
 *     N (U + k) E in place of NE, with k <= log2(1 + E / P)
 *
 * U is 1 for a kind's first launch. Of a kind that is known to vary, at most GATE_MOST_SENTINELS launches are in
 * flight, each with its own sentinel; U is how many of them are long. Of one that is not yet known to vary, U is, once,
 * what fits GATE_IN_FLIGHT_NS by expectation. All of this is paid for when it has ended, or earlier: work in flight for
 * longer than expected is charged while it runs. So in the long run the share is exact here too, unless more than
 * ACCOUNT_MOST_OWED_NS is owed at once.
 *
 * A neighbour with kernels of length E' begins its last one inside its own slot and is in the way for at most E', which
 * its own account must make good. */
#ifndef FGPU_GATE_H
#define FGPU_GATE_H

#include "slots.h"

#define GATE_IN_FLIGHT_NS UINT64_C(4000000)
#define GATE_SENTINELS 2
#define GATE_MOST_SENTINELS 30 /* of many streams with little work each */

struct gate_state {
    int64_t balance; /* of the account now, with all work in flight paid as expected */
    uint64_t in_flight; /* its expected length */
    uint64_t free_at; /* when it is expected to end; a past time: the device is free */
    unsigned sentinels; /* number that are not done yet */
    uint64_t longest; /* what this launch may take beyond expectation; 0: nothing known */
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

/* As much is in flight as is allowed. */
static inline bool gate_is_full(const struct gate_state *state, uint64_t expected) {
    return (state->sentinels >= GATE_SENTINELS && state->in_flight + expected > GATE_IN_FLIGHT_NS) ||
           state->sentinels >= GATE_MOST_SENTINELS;
}

/* Rule 2: the balance that the account must have at the slot's end. */
static inline int64_t gate_needs(uint64_t expected, struct slot slot) {
    uint64_t length = slot.end - slot.start;
    return (int64_t)((expected < length ? expected : length) / 2);
}

/* The usual case of gate_ask() alone, for each launch: the gate is open and the length fits the slot. */
static inline bool gate_is_open(struct slot slot, uint64_t now, uint64_t expected, const struct gate_state *state) {
    uint64_t longest = expected > state->longest ? expected : state->longest;
    return now >= slot.start && longest <= slot.end - slot.start && state->free_at < slot.end &&
           state->balance + (int64_t)(slot.end - now) >= gate_needs(expected, slot) && !gate_is_full(state, expected);
}

/* `slot` is the current one. */
struct gate_answer gate_ask(const struct slots *slots, struct slot slot, uint64_t now, uint64_t expected,
                            const struct gate_state *state);

#endif
