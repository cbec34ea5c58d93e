/* Launches. A kernel does nothing but take its device's time. */
#include "cuda_driver.h"

#define MAX_THREADS 1024
#define MAX_SHARED 232448

CUresult launch_check(struct CUfunc_st *function, const unsigned grid[3], const unsigned block[3], unsigned shared)
{
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!grid[0] || !grid[1] || !grid[2] || !threads || threads > MAX_THREADS || block[2] > 64 || grid[1] > 65535 ||
        grid[2] > 65535 || grid[0] > INT32_MAX || shared > MAX_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUresult launch(void *handle, const unsigned grid[3], const unsigned block[3], unsigned shared, CUstream named,
                       bool per_thread, void **arguments, void **extra)
{
    CUstream stream;
    CUresult result = stream_of(named, per_thread, &stream);
    if (result)
        return result;
    struct CUfunc_st *function = function_of(handle);
    result = launch_check(function, grid, block, shared);
    if (result)
        return result;
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
        parameters.kernel = (CUDA_KERNEL_NODE_PARAMS){.func = (CUfunction)handle,
                                                      .gridDimX = grid[0],
                                                      .gridDimY = grid[1],
                                                      .gridDimZ = grid[2],
                                                      .blockDimX = block[0],
                                                      .blockDimY = block[1],
                                                      .blockDimZ = block[2],
                                                      .sharedMemBytes = shared,
                                                      .kernelParams = arguments,
                                                      .extra = extra};
        return capture_add(stream, &parameters, NULL);
    }
    return stream_run(stream, function->duration_ns, 1);
}

STREAMED(cuLaunchKernel, 4000, cuLaunchKernel, _ptsz,
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
          unsigned int bz, unsigned int shared, CUstream stream, void **arguments, void **extra),
         (function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra))
{
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, per_thread, arguments,
                  extra);
}

STREAMED(cuLaunchKernelEx, 11060, cuLaunchKernelEx, _ptsz,
         (const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra),
         (config, function, arguments, extra))
{
    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, (unsigned[]){config->gridDimX, config->gridDimY, config->gridDimZ},
                  (unsigned[]){config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                  config->hStream, per_thread, arguments, extra);
}

STREAMED(cuLaunchCooperativeKernel, 9000, cuLaunchCooperativeKernel, _ptsz,
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
          unsigned int bz, unsigned int shared, CUstream stream, void **arguments),
         (function, gx, gy, gz, bx, by, bz, shared, stream, arguments))
{
    CUstream found;
    CUresult result = stream_of(stream, per_thread, &found);
    if (result)
        return result;
    /* All blocks have to be on the device at once. */
    uint64_t room = (uint64_t)found->context->device->machine->sm_count * (THREADS_PER_SM / MAX_THREADS);
    if ((uint64_t)gx * gy * gz * bx * by * bz > room * MAX_THREADS)
        return (CUresult)720; /* CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE */
    return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, per_thread, arguments,
                  NULL);
}

CALL(cuLaunchCooperativeKernelMultiDevice, 9000, cuLaunchCooperativeKernelMultiDevice, CUDA_LAUNCH_PARAMS *launches,
     unsigned int count, unsigned int flags)
{
    (void)flags;
    READY();
    if (!launches || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        CUDA_LAUNCH_PARAMS *one = &launches[i];
        CUresult result = launch(one->function, (unsigned[]){one->gridDimX, one->gridDimY, one->gridDimZ},
                                 (unsigned[]){one->blockDimX, one->blockDimY, one->blockDimZ}, one->sharedMemBytes,
                                 one->hStream, false, one->kernelParams, NULL);
        if (result)
            return result;
    }
    return CUDA_SUCCESS;
}

STREAMED(cuLaunchHostFunc, 10000, cuLaunchHostFunc, _ptsz, (CUstream handle, CUhostFn function, void *data),
         (handle, function, data))
{
    CUstream stream;
    CUresult result = stream_of(handle, per_thread, &stream);
    if (result || !function)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        CUgraphNodeParams parameters = {.type = CU_GRAPH_NODE_TYPE_HOST};
        *host_of(&parameters) = (CUDA_HOST_NODE_PARAMS){function, data};
        return capture_add(stream, &parameters, NULL);
    }
    return stream_call(stream, function, NULL, data);
}

/* ---- launches as before CUDA 4 ------------------------------------------------------------------------------- */

#define FUNCTION(variable, handle) \
    CURRENT(context_); \
    (void)context_; \
    struct CUfunc_st *variable = function_of(handle); \
    if (!variable) \
        return CUDA_ERROR_INVALID_HANDLE

static CUresult launch_old(CUfunction handle, int width, int height, CUstream stream)
{
    FUNCTION(function, handle);
    if (width <= 0 || height <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    return launch(function, (unsigned[]){(unsigned)width, (unsigned)height, 1}, (unsigned[]){1, 1, 1}, 0, stream, false,
                  NULL, NULL);
}

CALL(cuLaunch, 2000, cuLaunch, CUfunction function)
{
    return launch_old(function, 1, 1, NULL);
}

CALL(cuLaunchGrid, 2000, cuLaunchGrid, CUfunction function, int width, int height)
{
    return launch_old(function, width, height, NULL);
}

CALL(cuLaunchGridAsync, 2000, cuLaunchGridAsync, CUfunction function, int width, int height, CUstream stream)
{
    return launch_old(function, width, height, stream);
}

/* ---- occupancy -------------------------------------------------------------------------------------------------- */

static CUresult blocks_per_sm(int *out, CUfunction handle, int threads, size_t shared)
{
    FUNCTION(function, handle);
    (void)function;
    if (!out || threads <= 0 || threads > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    int by_threads = THREADS_PER_SM / threads < 32 ? THREADS_PER_SM / threads : 32;
    size_t by_shared = shared ? 233472 / (shared + 1024) : 32;
    *out = by_shared < (size_t)by_threads ? (int)by_shared : by_threads;
    return CUDA_SUCCESS;
}

CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, cuOccupancyMaxActiveBlocksPerMultiprocessor, int *blocks,
     CUfunction function, int threads, size_t shared)
{
    return blocks_per_sm(blocks, function, threads, shared);
}

static CUresult block_size(int *grid, int *block, CUfunction handle, int limit)
{
    FUNCTION(function, handle);
    (void)function;
    CURRENT(context);
    if (!grid || !block || limit < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *block = limit && limit < MAX_THREADS ? limit : MAX_THREADS;
    *grid = (int)context->device->machine->sm_count * (THREADS_PER_SM / *block);
    return CUDA_SUCCESS;
}

CALL(cuOccupancyMaxPotentialBlockSize, 6050, cuOccupancyMaxPotentialBlockSize, int *grid, int *block,
     CUfunction function, size_t (*shared_of)(int), size_t shared, int limit)
{
    (void)shared_of, (void)shared;
    return block_size(grid, block, function, limit);
}
