/* The decision over a launch. gate.h has the rules. */
#include "gate.h"

#define AT_LEAST_NS UINT64_C(2000000) /* the first part of a slot, if a quarter of the slot is less */
#define LOOK_AHEAD 64 /* slots; then the caller asks again */

/* The next slot, after `slot`, for which the account will suffice. */
static struct gate_answer next(const struct slots *slots, uint64_t now, uint64_t expected,
                               const struct gate_state *state, struct slot slot) {
    uint64_t entitled = slots_entitled(slots, now);
    for (int n = 0; n < LOOK_AHEAD; n++) {
        slot = slots_at(slots, slot.end);
        int64_t by_then = state->balance + (int64_t)(slots_entitled(slots, slot.end) - entitled);
        if (by_then >= gate_needs(expected, slot))
            break;
    }
    return (struct gate_answer){GATE_WAIT, slot.start};
}

struct gate_answer gate_ask(const struct slots *slots, struct slot slot, uint64_t now, uint64_t expected,
                            const struct gate_state *state) {
    if (now < slot.start)
        return next(slots, now, expected, state, (struct slot){.end = slot.start});
    int64_t at_end = state->balance + (int64_t)(slot.end - now), need = gate_needs(expected, slot);
    uint64_t begins = state->free_at > now ? state->free_at : now;
    if (at_end < need || begins >= slot.end) {
        /* If the work in flight ends early, there may be room. */
        if (state->sentinels > 0 && at_end + (int64_t)state->in_flight >= need)
            return (struct gate_answer){.verdict = GATE_SENTINEL};
        return next(slots, now, expected, state, slot);
    }
    uint64_t length = slot.end - slot.start, first_part = length / 4 > AT_LEAST_NS ? length / 4 : AT_LEAST_NS;
    if ((expected > length || state->longest > length) && begins - slot.start > first_part) {
        if (state->sentinels > 0 && now - slot.start <= first_part)
            return (struct gate_answer){.verdict = GATE_SENTINEL};
        return next(slots, now, expected, state, slot);
    }
    if (gate_is_full(state, expected))
        return (struct gate_answer){.verdict = GATE_SENTINEL};
    return (struct gate_answer){.verdict = GATE_OPEN};
}
