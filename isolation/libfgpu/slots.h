/* A session's time slots on one device: pure arithmetic on CLOCK_MONOTONIC, in nanoseconds. */
#ifndef FGPU_SLOTS_H
#define FGPU_SLOTS_H

#include "fgpu.h"

/* The same period for all sessions of a host, as their slots would overlap otherwise. It is a compromise: a slot of 10
 * percent must hold a kernel of 5 ms, as longer work disturbs the neighbours; and a notebook cell waits for up to one
 * period before its first kernel runs. */
#define SLOTS_PERIOD_NS UINT64_C(50000000)

struct slots {
    uint64_t origin; /* where slot 0 begins in the period: no slot crosses the end of a period counted from here */
    uint64_t per_period; /* the sum of all slots */
    uint64_t hundredths; /* the same in hundredths of a period */
    unsigned count;
    struct {
        uint64_t from, to, before; /* since the origin; the sum of the slots before this one */
    } slot[FGPU_MAX_SLOTS];
};

/* The slot that contains a time, otherwise the next one. start <= now < end: inside. */
struct slot {
    uint64_t start, end;
};

/* Joins slots that touch, across the period's end too. The device's limits are valid: at least one slot. */
void slots_from_limits(struct slots *slots, const struct fgpu_device *device);

struct slot slots_at(const struct slots *slots, uint64_t now);

/* The time that the session was inside its slots since the beginning of time. */
uint64_t slots_entitled(const struct slots *slots, uint64_t now);

#endif
