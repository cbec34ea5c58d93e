/* Times launches of a kernel that does nothing, and prints nanoseconds per launch (the median of blocks).
 *     launch [launches per block] [blocks] */
#define _GNU_SOURCE
#include "driver.h"

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const int launches = argc > 1 ? atoi(argv[1]) : 1000;
    const int blocks = argc > 2 ? atoi(argv[2]) : 101;
    open_driver();
    CUfunction kernel = spinning_kernel(0);
    __typeof__(&cuLaunchKernel) launch = CALL(cuLaunchKernel);
    __typeof__(&cuCtxSynchronize) synchronise = CALL(cuCtxSynchronize);
    uint64_t length = 0;
    void *parameters[] = {&length};
    double *each = calloc((size_t)blocks, sizeof *each);
    for (int block = -10; block < blocks; block++) { /* the first ones warm up */
        const uint64_t began = now_ns();
        for (int n = 0; n < launches; n++)
            check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        if (block >= 0)
            each[block] = (double)(now_ns() - began) / launches;
        OK(synchronise());
    }
    qsort(each, (size_t)blocks, sizeof *each, ascending);
    printf("%.1f\n", each[blocks / 2]);
    return 0;
}
