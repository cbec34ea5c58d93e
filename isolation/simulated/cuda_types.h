/* Types of the CUDA driver's interface that only the simulated one needs. */
#ifndef CUDA_TYPES_H
#define CUDA_TYPES_H

#include "../include/cuda_abi.h"

#ifndef __cuda_cuda_h__

typedef struct {
    CUdeviceptr dst;
    size_t pitch;
    unsigned int value;
    unsigned int elementSize;
    size_t width, height;
} CUDA_MEMSET_NODE_PARAMS;

typedef struct {
    CUhostFn fn;
    void *userData;
} CUDA_HOST_NODE_PARAMS;

#define CU_EVENT_RECORD_EXTERNAL 1
#define CU_EVENT_WAIT_EXTERNAL 1
#define CU_MEMHOSTALLOC_DEVICEMAP 2

#endif

#endif
