/* A worker of the storm (storm.c) that takes bytes from the region and gives them back: region_worker SEED */
#include "fgpu.h"
#include "storm.h"

#include <stdlib.h>

#define HELD 8

/* Most sizes are small parts of the limit; some are most of it, so that reservations collide. */
static uint64_t size_of_next(uint64_t *state) {
    uint64_t limit = storm_limit();
    return 1 + storm_random(state, storm_random(state, 8) == 0 ? limit : limit / 16);
}

int main(int argc, char **argv) {
    uint64_t held[HELD] = {0}, state = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    storm_join();
    for (;;) {
        /* Without the ledger, as its lock takes longer than all this: so most kills hit the region's code. */
        for (uint64_t i = storm_random(&state, 64); i > 0; i--) {
            uint64_t bytes = size_of_next(&state);
            if (fgpu_reserve(0, bytes, storm_limit()) == FGPU_GRANTED)
                fgpu_release(0, bytes);
        }
        uint64_t *one = &held[storm_random(&state, HELD)];
        if (*one == 0) {
            uint64_t bytes = size_of_next(&state);
            switch (fgpu_reserve(0, bytes, storm_limit())) {
            case FGPU_GRANTED:
                storm_own(bytes);
                *one = bytes;
                break;
            case FGPU_OVER: storm_refused(); break;
            case FGPU_REFUSED: return 1;
            }
        } else {
            storm_disown(*one);
            fgpu_release(0, *one);
            *one = 0;
        }
        if (storm_random(&state, 64) == 0)
            fgpu_used(0); /* clears, while others take those slots */
    }
}
