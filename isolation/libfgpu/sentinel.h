/* Events that measure when the work of a stream began and ended, by the host's clock. For throttle.c, which holds the
 * context's lock around each call and calls only while the context is current, as events of another may be gone. A
 * failure returns false or SENTINEL_LOST, and never harms the program. */
#ifndef FGPU_SENTINEL_H
#define FGPU_SENTINEL_H

#include "hooks.h"

#define SENTINEL_SPARE 16

/* The events of one context, and the relation of its device's clock to the host's. */
struct sentinels {
    CUevent spare[SENTINEL_SPARE];
    unsigned spare_count;
    CUevent reference; /* one that is done */
    uint64_t reference_at;
};

struct sentinel {
    CUevent event;        /* NULL: none */
    uint64_t recorded_at; /* the host's time just before; the event is done later */
};

enum sentinel_state { SENTINEL_PENDING, SENTINEL_DONE, SENTINEL_LOST };

bool sentinel_record(struct sentinels *sentinels, struct sentinel *sentinel, CUstream stream);
enum sentinel_state sentinel_ask(const struct sentinel *sentinel);

/* When a sentinel was done that is SENTINEL_DONE at the time `now`. It becomes the reference. False if the driver
 * cannot tell. */
bool sentinel_when(struct sentinels *sentinels, struct sentinel *sentinel, uint64_t now, uint64_t *when);

/* Returns the event. */
void sentinel_drop(struct sentinels *sentinels, struct sentinel *sentinel);

#endif
