/* Runs cells of a notebook: kernels of one length, all launched and then waited for, and a pause after them. Prints how
 * many milliseconds each cell took.
 *     cells KERNEL_US BEGIN [CELL_MS PAUSE_MS]...      BEGIN in nanoseconds of CLOCK_MONOTONIC */
#define _GNU_SOURCE
#include "driver.h"

static void sleep_until(uint64_t time) {
    const struct timespec until = {(time_t)(time / UINT64_C(1000000000)), (long)(time % UINT64_C(1000000000))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {
    }
}

int main(int argc, char **argv) {
    if (argc < 5 || argc % 2 == 0) {
        fprintf(stderr, "usage: cells KERNEL_US BEGIN [CELL_MS PAUSE_MS]...\n");
        return 2;
    }
    const unsigned long us = strtoul(argv[1], NULL, 10);
    open_driver();
    CUfunction kernel = spinning_kernel(us);
    uint64_t length = us * 1000;
    void *parameters[] = {&length};
    __typeof__(&cuLaunchKernel) launch = CALL(cuLaunchKernel);
    __typeof__(&cuCtxSynchronize) synchronise = CALL(cuCtxSynchronize);
    check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel"); /* its length is known then */
    OK(synchronise());
    sleep_until(strtoull(argv[2], NULL, 10));
    for (int n = 3; n < argc; n += 2) {
        const uint64_t began = now_ns();
        for (unsigned long count = strtoul(argv[n], NULL, 10) * 1000 / us; count > 0; count--)
            check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        OK(synchronise());
        const uint64_t ended = now_ns();
        printf("%.3f\n", (double)(ended - began) / 1e6);
        sleep_until(ended + strtoull(argv[n + 1], NULL, 10) * 1000000);
    }
    return 0;
}
