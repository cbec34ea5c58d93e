/* Time slots: pure arithmetic. slots.h says what. */
#include "slots.h"

#define HUNDREDTH_NS (SLOTS_PERIOD_NS / 100)

/* Time since the origin; one period is added, as `now` may be less than the origin. */
static uint64_t since_origin(const struct slots *slots, uint64_t now) {
    return now + SLOTS_PERIOD_NS - slots->origin;
}

void slots_from_limits(struct slots *slots, const struct fgpu_device *device) {
    unsigned given = device->slot_count, first = 0;
    bool crosses = given > 1 && device->slots[0].from == 0 && device->slots[given - 1].to == 100;
    if (crosses) /* begin behind the first gap, so that the slot that crosses the period's end comes last and whole */
        while (first + 1 < given && device->slots[first].to == device->slots[first + 1].from)
            first++;
    first = crosses ? (first + 1) % given : 0;
    *slots = (struct slots){.origin = device->slots[first].from * HUNDREDTH_NS};
    for (unsigned n = 0; n < given; n++) {
        unsigned index = (first + n) % given;
        uint64_t lap = index < first ? SLOTS_PERIOD_NS : 0;
        uint64_t from = device->slots[index].from * HUNDREDTH_NS + lap - slots->origin;
        uint64_t to = device->slots[index].to * HUNDREDTH_NS + lap - slots->origin;
        if (slots->count > 0 && slots->slot[slots->count - 1].to == from) {
            slots->slot[slots->count - 1].to = to;
        } else {
            slots->slot[slots->count].before = slots->per_period;
            slots->slot[slots->count].from = from;
            slots->slot[slots->count++].to = to;
        }
        slots->per_period += to - from;
    }
    slots->hundredths = slots->per_period / HUNDREDTH_NS;
}

struct slot slots_at(const struct slots *slots, uint64_t now) {
    uint64_t within = since_origin(slots, now) % SLOTS_PERIOD_NS, period = now - within;
    for (unsigned n = 0; n < slots->count; n++)
        if (within < slots->slot[n].to)
            return (struct slot){period + slots->slot[n].from, period + slots->slot[n].to};
    period += SLOTS_PERIOD_NS;
    return (struct slot){period + slots->slot[0].from, period + slots->slot[0].to};
}

uint64_t slots_entitled(const struct slots *slots, uint64_t now) {
    uint64_t since = since_origin(slots, now), within = since % SLOTS_PERIOD_NS;
    uint64_t sum = since / SLOTS_PERIOD_NS * slots->per_period;
    unsigned n = slots->count;
    while (n > 0 && within < slots->slot[n - 1].from)
        n--;
    if (n == 0)
        return sum;
    uint64_t in_slot = within < slots->slot[n - 1].to ? within : slots->slot[n - 1].to;
    return sum + slots->slot[n - 1].before + in_slot - slots->slot[n - 1].from;
}
