/* The ledger of the storm: see storm.h. */
#include "storm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct storm_ledger *ledger;
static int ledger_lock, own_index;

static void change_lock(int descriptor, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
    if (fcntl(descriptor, F_OFD_SETLKW, &lock) != 0) {
        perror("storm: lock");
        exit(2);
    }
}

void storm_lock(int descriptor) {
    change_lock(descriptor, F_WRLCK);
}

void storm_unlock(int descriptor) {
    change_lock(descriptor, F_UNLCK);
}

int storm_open(const char *path, struct storm_ledger **out) {
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        perror(path);
        exit(2);
    }
    *out = mmap(NULL, sizeof **out, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (*out == MAP_FAILED) {
        perror("storm: map");
        exit(2);
    }
    return descriptor;
}

void storm_join(void) {
    const char *path = getenv("STORM_LEDGER"), *index = getenv("STORM_INDEX");
    if (path == NULL || index == NULL) {
        fputs("storm: to be started by the storm only\n", stderr);
        exit(2);
    }
    ledger_lock = storm_open(path, &ledger);
    own_index = atoi(index);
}

uint64_t storm_limit(void) {
    return ledger->limit;
}

void storm_own(uint64_t bytes) {
    storm_lock(ledger_lock);
    uint64_t sum = 0;
    ledger->held[own_index] += bytes;
    for (int i = 0; i < STORM_WORKERS; i++)
        sum += ledger->held[i];
    ledger->grants++;
    ledger->violations += sum > ledger->limit;
    if (ledger->most < sum)
        ledger->most = sum;
    storm_unlock(ledger_lock);
}

void storm_disown(uint64_t bytes) {
    storm_lock(ledger_lock);
    ledger->held[own_index] -= bytes;
    storm_unlock(ledger_lock);
}

void storm_refused(void) {
    __atomic_fetch_add(&ledger->refusals, 1, __ATOMIC_RELAXED);
}

uint64_t storm_random(uint64_t *state, uint64_t bound) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state % bound;
}
