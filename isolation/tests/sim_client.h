/* For the programs that test the simulated driver: each call is checked, and failures are printed. */
#ifndef SIM_CLIENT_H
#define SIM_CLIENT_H

#include "cuda_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

#define EXPECT(call, wanted) \
    do { \
        int result_ = (int)(call); \
        if (result_ != (int)(wanted)) { \
            fprintf(stderr, "%s:%d: %s is %d, not %d\n", __FILE__, __LINE__, #call, result_, (int)(wanted)); \
            exit(1); \
        } \
    } while (0)

#define OK(call) EXPECT(call, CUDA_SUCCESS)

#define SAME(left, right) \
    do { \
        unsigned long long left_ = (unsigned long long)(left), right_ = (unsigned long long)(right); \
        if (left_ != right_) { \
            fprintf(stderr, "%s:%d: %s is %llu, %s is %llu\n", __FILE__, __LINE__, #left, left_, #right, right_); \
            exit(1); \
        } \
    } while (0)

#define TRUE(what) SAME(!!(what), 1)

/* Device 0, with its primary context current. */
static inline CUcontext sim_start(void)
{
    CUcontext context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    return context;
}

/* A kernel of this name, from a module of its own. */
static inline CUfunction sim_kernel(const char *name)
{
    char image[256];
    CUmodule module;
    CUfunction function;
    snprintf(image, sizeof image, ".version 8.0\n.target sm_90\n.visible .entry %s(.param .u64 x)\n{ ret; }\n", name);
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&function, module, name));
    return function;
}

static inline void sim_launch(CUfunction function, CUstream stream)
{
    unsigned long long x = 0;
    void *arguments[] = {&x};
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

static inline size_t sim_free(void)
{
    size_t left, total;
    OK(cuMemGetInfo_v2(&left, &total));
    return left;
}

#endif
