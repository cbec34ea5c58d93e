/* Times one kind of call through the driver's own interface, and prints nanoseconds per call (the median of blocks).
 * memory alloc-free|info|nothing [calls per block] [blocks]
 * `nothing` only opens the driver: for timing the start of a process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void *cuda;

static void *function(const char *name)
{
    void *found = dlsym(cuda, name);
    if (!found) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(2);
    }
    return found;
}

static void check(int status, const char *what)
{
    if (status != 0) {
        fprintf(stderr, "%s: error %d\n", what, status);
        exit(2);
    }
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "alloc-free";
    const int calls = argc > 2 ? atoi(argv[2]) : 1000;
    const int blocks = argc > 3 ? atoi(argv[3]) : 51;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*init)(unsigned) = (int (*)(unsigned))function("cuInit");
    int (*get)(int *, int) = (int (*)(int *, int))function("cuDeviceGet");
    int (*retain)(void **, int) = (int (*)(void **, int))function("cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))function("cuCtxSetCurrent");
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))function("cuMemAlloc_v2");
    int (*release)(uint64_t) = (int (*)(uint64_t))function("cuMemFree_v2");
    int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))function("cuMemGetInfo_v2");
    check(init(0), "cuInit");
    if (!strcmp(what, "nothing"))
        return 0;
    int device;
    void *context;
    check(get(&device, 0), "cuDeviceGet");
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set(context), "cuCtxSetCurrent");
    double *each = calloc((size_t)blocks, sizeof *each);
    for (int block = -1; block < blocks; block++) { /* The first warms up. */
        const double began = now_ns();
        for (int call = 0; call < calls; call++) {
            if (what[0] == 'a') {
                uint64_t address;
                check(alloc(&address, 2 << 20), "cuMemAlloc");
                check(release(address), "cuMemFree");
            } else {
                size_t free_bytes, total;
                check(info(&free_bytes, &total), "cuMemGetInfo");
            }
        }
        if (block >= 0)
            each[block] = (now_ns() - began) / calls;
    }
    qsort(each, (size_t)blocks, sizeof *each, ascending);
    printf("%.1f\n", each[blocks / 2]);
    return 0;
}
