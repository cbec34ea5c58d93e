/* The driver as a program finds it that was not linked against it, and a kernel that takes so long as it is told. */
#ifndef BENCH_DRIVER_H
#define BENCH_DRIVER_H

#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void *driver;

#define CALL(name) ((__typeof__(&name))found(#name))
#define OK(call) check((int)(call), #call)

static inline void *found(const char *name) {
    void *address = dlsym(driver, name);
    if (address == NULL) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(2);
    }
    return address;
}

static inline void check(int result, const char *what) {
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "%s: error %d\n", what, result);
        exit(2);
    }
}

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* The first device's primary context is current afterwards. */
static inline void open_driver(void) {
    CUdevice device;
    CUcontext context;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    OK(CALL(cuInit)(0));
    OK(CALL(cuDeviceGet)(&device, 0));
    OK(CALL(cuDevicePrimaryCtxRetain)(&context, device));
    OK(CALL(cuCtxSetCurrent)(context));
}

/* One thread that counts its own time until `length` nanoseconds are full: steps of more than 100 us are times in which
 * the device served somebody else. A simulated driver goes by the name. */
static inline CUfunction spinning_kernel(unsigned long us) {
    char text[1024], name[64];
    CUmodule module;
    CUfunction function;
    snprintf(name, sizeof name, "spin_%luus", us);
    snprintf(text, sizeof text,
             ".version 6.0\n.target sm_50\n.address_size 64\n"
             ".visible .entry %s(.param .u64 length)\n{\n"
             ".reg .u64 %%r<6>;\n.reg .pred %%p<3>;\n"
             "ld.param.u64 %%r1, [length];\n"
             "mov.u64 %%r2, %%globaltimer;\n"
             "mov.u64 %%r5, 0;\n"
             "again:\n"
             "mov.u64 %%r3, %%globaltimer;\n"
             "sub.u64 %%r4, %%r3, %%r2;\n"
             "mov.u64 %%r2, %%r3;\n"
             "setp.gt.u64 %%p1, %%r4, 100000;\n"
             "@%%p1 bra again;\n"
             "add.u64 %%r5, %%r5, %%r4;\n"
             "setp.lt.u64 %%p2, %%r5, %%r1;\n"
             "@%%p2 bra again;\n"
             "ret;\n}\n",
             name);
    OK(CALL(cuModuleLoadData)(&module, text));
    OK(CALL(cuModuleGetFunction)(&function, module, name));
    return function;
}

#endif
