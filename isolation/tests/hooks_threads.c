/* Eight threads take and give memory in all ways at once, at the limit. Prints "refused N", and "used N" at the end. */
#include "cuda_abi.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define THREADS 8
#define ROUNDS 400
#define MIB ((size_t)1 << 20)

static CUcontext context;
static atomic_int refused;

static void check(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %d\n", what, (int)result);
    exit(1);
}

/* True if it was granted. */
static int granted(const char *what, CUresult result) {
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        atomic_fetch_add(&refused, 1);
        return 0;
    }
    check(what, result);
    return 1;
}

static void plain(size_t bytes) {
    CUdeviceptr address[4];
    int count = 0;
    while (count < 4 && granted("cuMemAlloc_v2", cuMemAlloc_v2(&address[count], bytes)))
        count++;
    while (count-- > 0)
        check("cuMemFree_v2", cuMemFree_v2(address[count]));
}

static void in_order(size_t bytes, CUstream stream) {
    CUdeviceptr first, second;
    if (granted("cuMemAllocAsync", cuMemAllocAsync(&first, bytes, stream))) {
        if (granted("cuMemAllocAsync", cuMemAllocAsync(&second, bytes / 2, stream)))
            check("cuMemFreeAsync", cuMemFreeAsync(second, stream));
        check("cuMemFreeAsync", cuMemFreeAsync(first, stream));
    }
    check("cuStreamSynchronize", cuStreamSynchronize(stream));
}

static void mapped(size_t bytes) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    bytes = (bytes / (2 * MIB) + 1) * 2 * MIB;
    if (!granted("cuMemCreate", cuMemCreate(&handle, bytes, &properties, 0)))
        return;
    check("cuMemAddressReserve", cuMemAddressReserve(&address, bytes, 0, 0, 0));
    check("cuMemMap", cuMemMap(address, bytes, 0, handle, 0));
    check("cuMemRelease", cuMemRelease(handle));
    check("cuMemUnmap", cuMemUnmap(address, bytes));
    check("cuMemAddressFree", cuMemAddressFree(address, bytes));
}

static void array(size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR space = {1024, bytes / 1024, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};
    CUarray made;
    if (granted("cuArray3DCreate_v2", cuArray3DCreate_v2(&made, &space)))
        check("cuArrayDestroy", cuArrayDestroy(made));
}

static void *work(void *data) {
    unsigned int seed = (unsigned int)(size_t)data;
    CUstream stream;
    check("cuCtxSetCurrent", cuCtxSetCurrent(context));
    check("cuStreamCreate", cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < ROUNDS; i++) {
        size_t bytes = (size_t)(1 + rand_r(&seed) % 24) * MIB;
        switch (rand_r(&seed) % 4) {
        case 0: plain(bytes); break;
        case 1: in_order(bytes, stream); break;
        case 2: mapped(bytes); break;
        default: array(bytes); break;
        }
    }
    check("cuStreamDestroy_v2", cuStreamDestroy_v2(stream));
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    size_t unused, total;
    CUdeviceptr held; /* enough for one thread alone to reach the limit of 128 MiB */
    check("cuInit", cuInit(0));
    check("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, 0));
    check("cuCtxSetCurrent", cuCtxSetCurrent(context));
    check("cuMemAlloc_v2", cuMemAlloc_v2(&held, 60 * MIB));
    for (size_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    check("cuMemFree_v2", cuMemFree_v2(held));
    check("cuCtxSynchronize", cuCtxSynchronize());
    check("cuMemGetInfo_v2", cuMemGetInfo_v2(&unused, &total));
    printf("refused %d\nused %zu\n", atomic_load(&refused), total - unused);
    return 0;
}
