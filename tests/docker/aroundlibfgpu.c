/* A program that computes without libfgpu, linked statically with the simulated driver: kernels of 5 ms, one after
 * another. It takes no memory. */
#include "cuda_abi.h"

#include <stdio.h>

static void check(CUresult result, const char *what)
{
    if (result != CUDA_SUCCESS) {
        printf("%s: %d\n", what, (int)result);
        fflush(stdout);
        __builtin_trap();
    }
}

int main(void)
{
    static const char text[] =
        ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry spin_5ms()\n{\nret;\n}\n";
    CUcontext context;
    CUmodule module;
    CUfunction kernel;

    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuModuleLoadData(&module, text), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, "spin_5ms"), "cuModuleGetFunction");
    for (;;) {
        check(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        check(cuCtxSynchronize(), "cuCtxSynchronize");
    }
}
