/* Compares fgpu_now() with the kernel's clock, read before and after it, while the program alternately computes and
 * sleeps. Prints the largest number of nanoseconds that it was ahead, behind, and went back. */
#include "clock.h"

#include <stdio.h>
#include <time.h>

static uint64_t kernels(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void keep_most(uint64_t *most, uint64_t from, uint64_t to) {
    if (to > from && to - from > *most)
        *most = to - from;
}

int main(void) {
    uint64_t ahead = 0, behind = 0, back = 0, last = 0;
    for (int n = 0; n < 1000000; n++) {
        uint64_t before = kernels(), now = fgpu_now(), after = kernels();
        keep_most(&ahead, after, now);
        keep_most(&behind, now, before);
        keep_most(&back, now, last);
        last = now;
        if (n % 10000 == 0)
            fgpu_sleep_until(after + 1000000);
    }
    printf("%llu %llu %llu\n", (unsigned long long)ahead, (unsigned long long)behind, (unsigned long long)back);
    return 0;
}
