/* Keeps the device busy with kernels of one length and says how much of the device's time it got: kernels launched in
 * the window times their length. What is in flight at the window's two ends is about the same. With LONG_US each
 * EVERYth kernel takes that long: a simulated device, which goes by the function's name, cannot do so.
 *     share KERNEL_US STREAMS BEGIN END [LONG_US EVERY]      BEGIN and END in nanoseconds of CLOCK_MONOTONIC */
#define _GNU_SOURCE
#include "driver.h"

#define MOST_STREAMS 64

int main(int argc, char **argv) {
    if (argc != 5 && argc != 7) {
        fprintf(stderr, "usage: share KERNEL_US STREAMS BEGIN END [LONG_US EVERY]\n");
        return 2;
    }
    const unsigned long us = strtoul(argv[1], NULL, 10), streams = strtoul(argv[2], NULL, 10);
    const uint64_t begin = strtoull(argv[3], NULL, 10), end = strtoull(argv[4], NULL, 10);
    const uint64_t longer = argc == 7 ? strtoull(argv[5], NULL, 10) * 1000 : 0;
    const unsigned long every = argc == 7 ? strtoul(argv[6], NULL, 10) : 1;
    open_driver();
    CUfunction kernel = spinning_kernel(us);
    CUstream stream[MOST_STREAMS];
    for (unsigned long n = 0; n < streams && n < MOST_STREAMS; n++)
        OK(CALL(cuStreamCreate)(&stream[n], 1)); /* CU_STREAM_NON_BLOCKING */
    __typeof__(&cuLaunchKernel) launch = CALL(cuLaunchKernel);
    uint64_t length, got = 0, now = 0;
    void *parameters[] = {&length};
    for (unsigned long n = 0; now < end; n++) {
        length = longer && n % every == every - 1 ? longer : us * 1000;
        check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream[n % streams], parameters, NULL), "cuLaunchKernel");
        now = now_ns();
        if (now >= begin && now < end)
            got += length;
    }
    OK(CALL(cuCtxSynchronize)());
    printf("%.6f\n", (double)got / (double)(end - begin));
    return 0;
}
