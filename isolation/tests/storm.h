/* Shared by the storm's parent and its workers: the ledger, an independent record of what each process holds. */
#ifndef STORM_H
#define STORM_H

#include <stdint.h>

#define STORM_WORKERS 64

struct storm_ledger {
    uint64_t limit;
    uint64_t held[STORM_WORKERS]; /* bytes; used only under the ledger's lock */
    uint64_t most; /* the most ever held at once */
    uint64_t grants, refusals;
    uint64_t violations; /* grants that took the sum above the limit */
};

/* For a worker; ends it with a message if it was not started by a storm. */
void storm_join(void);

/* The session's limit. */
uint64_t storm_limit(void);

/* Call when bytes have been granted, and before they are given back. */
void storm_own(uint64_t bytes);
void storm_disown(uint64_t bytes);

/* Call when bytes were not granted. */
void storm_refused(void);

/* The storm's own random numbers (xorshift), from 0 to below `bound`. */
uint64_t storm_random(uint64_t *state, uint64_t bound);

/* The ledger's lock, with its own open file description: it ends with its holder. */
int storm_open(const char *path, struct storm_ledger **ledger);
void storm_lock(int descriptor);
void storm_unlock(int descriptor);

#endif
