/* Events that say when the work of a stream began and ended, on the host's clock. For throttle.c, which holds the
 * context's lock around each call and calls only while that context is the current one: an event of another may be
 * gone. What fails returns false or SENTINEL_LOST, and never harms the program. */
#ifndef FGPU_SENTINEL_H
#define FGPU_SENTINEL_H

#include "hooks.h"

#define SENTINEL_SPARE 16

/* The events of one context, and how its device's clock relates to the host's. */
struct sentinels {
    CUevent spare[SENTINEL_SPARE];
    unsigned spare_count;
    CUevent reference; /* one that is done */
    uint64_t reference_at;
};

struct sentinel {
    CUevent event;        /* NULL: none */
    uint64_t recorded_at; /* the host's time just before: it is done later */
};

enum sentinel_state { SENTINEL_PENDING, SENTINEL_DONE, SENTINEL_LOST };

bool sentinel_record(struct sentinels *sentinels, struct sentinel *sentinel, CUstream stream);
enum sentinel_state sentinel_ask(const struct sentinel *sentinel);

/* When a sentinel was done that is SENTINEL_DONE at the time `now`. It becomes the reference. False if the driver cannot
 * tell. */
bool sentinel_when(struct sentinels *sentinels, struct sentinel *sentinel, uint64_t now, uint64_t *when);

/* Gives the event back. */
void sentinel_drop(struct sentinels *sentinels, struct sentinel *sentinel);

#endif
