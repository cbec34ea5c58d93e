/* The calls of the simulated driver, group by group: sim_calls GROUP on a device of 1024 MiB without other processes.
 * Ends with 0 if all results are as expected. */
#include "sim_client.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static const size_t device_bytes = 1024 * MIB;

/* ---- memory ------------------------------------------------------------------------------------------- */

static void plain(void)
{
    CUdeviceptr first, second, start;
    size_t before = sim_free(), bytes;
    unsigned char data[4];
    SAME(before, device_bytes);
    OK(cuMemAlloc_v2(&first, 600 * MIB));
    SAME(sim_free(), before - 600 * MIB);
    EXPECT(cuMemAlloc_v2(&second, 425 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemAlloc_v2(&second, 424 * MIB));
    SAME(sim_free(), 0);
    EXPECT(cuMemAlloc_v2(&start, 1), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemGetAddressRange_v2(&start, &bytes, first + 5));
    SAME(start, first);
    SAME(bytes, 600 * MIB);
    OK(cuMemsetD8_v2(first, 7, 4));
    OK(cuMemcpyDtoD_v2(second, first, 4));
    OK(cuMemcpyDtoH_v2(data, second, 4));
    SAME(data[3], 7);
    EXPECT(cuMemcpyDtoH_v2(data, second + 424 * MIB - 2, 4), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(first));
    EXPECT(cuMemFree_v2(first), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemFree_v2(second + 1), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFree_v2(second));
    OK(cuMemFree_v2(0));
    EXPECT(cuMemAlloc_v2(&first, 0), CUDA_ERROR_INVALID_VALUE);
    SAME(sim_free(), before);
    OK(cuMemAllocPitch_v2(&first, &bytes, 1000, 1024, 4));
    SAME(bytes, 1024);
    SAME(sim_free(), before - MIB);
    OK(cuMemFree_v2(first));
}

/* Before CUDA 3.2. */
static void old(void)
{
    CUdeviceptr_v1 address;
    unsigned int left, total;
    unsigned char data = 9;
    OK(cuMemAlloc(&address, 512 * MIB));
    OK(cuMemGetInfo(&left, &total));
    SAME(left, 512 * MIB);
    SAME(total, device_bytes);
    OK(cuMemsetD8_v2(address, 3, 1));
    OK(cuMemcpyDtoH_v2(&data, address, 1));
    SAME(data, 3);
    OK(cuMemFree(address));
    SAME(sim_free(), device_bytes);
}

static void host_and_managed(void)
{
    CUdeviceptr managed;
    void *host;
    unsigned int flags = 9;
    OK(cuMemAllocManaged(&managed, 2 * device_bytes, CU_MEM_ATTACH_GLOBAL));
    OK(cuMemHostAlloc(&host, MIB, 0));
    memset(host, 1, MIB);
    memset((void *)(uintptr_t)managed, 1, 64);
    SAME(sim_free(), device_bytes);
    OK(cuPointerGetAttribute(&flags, CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
    SAME(flags, 1);
    OK(cuPointerGetAttribute(&flags, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)host));
    SAME(flags, CU_MEMORYTYPE_HOST);
    EXPECT(cuPointerGetAttribute(&flags, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)&flags), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemFree_v2((uintptr_t)host), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFreeHost(host));
    OK(cuMemFree_v2(managed));
}

static void arrays(void)
{
    CUarray array;
    CUmipmappedArray mipmap;
    CUDA_ARRAY_DESCRIPTOR flat = {1024, 1024, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR deep = {256, 256, 256, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};
    OK(cuArrayCreate_v2(&array, &flat));
    SAME(sim_free(), device_bytes - 16 * MIB);
    OK(cuArrayDestroy(array));
    OK(cuArray3DCreate_v2(&array, &deep));
    SAME(sim_free(), device_bytes - 16 * MIB);
    OK(cuArrayDestroy(array));
    deep.Flags = CUDA_ARRAY3D_SPARSE;
    OK(cuArray3DCreate_v2(&array, &deep));
    SAME(sim_free(), device_bytes);
    OK(cuArrayDestroy(array));
    deep.Flags = 0;
    deep.Depth = 0;
    OK(cuMipmappedArrayCreate(&mipmap, &deep, 2));
    SAME(sim_free(), device_bytes - 256 * 256 - 128 * 128);
    OK(cuMipmappedArrayDestroy(mipmap));
    flat.Width = flat.Height = 10000;
    EXPECT(cuArrayCreate_v2(&array, &flat), CUDA_ERROR_OUT_OF_MEMORY);
    SAME(sim_free(), device_bytes);
}

static cuuint64_t of_pool(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    cuuint64_t value = 0;
    OK(cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void pools(void)
{
    CUmemoryPool pool, own;
    CUdeviceptr first, second;
    cuuint64_t keep = 64 * MIB, everything = UINT64_MAX;
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    OK(cuDeviceGetDefaultMemPool(&pool, 0));
    OK(cuMemAllocAsync(&first, 10 * MIB, NULL));
    SAME(sim_free(), device_bytes - 32 * MIB);
    SAME(of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
    SAME(of_pool(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 10 * MIB);
    OK(cuMemAllocAsync(&second, 22 * MIB, NULL));
    SAME(sim_free(), device_bytes - 32 * MIB);
    OK(cuMemFreeAsync(second, NULL));
    OK(cuMemAllocAsync(&second, 100 * MIB, NULL));
    SAME(of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 128 * MIB);
    OK(cuMemFreeAsync(second, NULL));
    SAME(sim_free(), device_bytes - 128 * MIB);
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &everything));
    OK(cuStreamSynchronize(NULL));
    SAME(sim_free(), device_bytes - 128 * MIB);
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    OK(cuStreamSynchronize(NULL));
    SAME(sim_free(), device_bytes - 64 * MIB);
    OK(cuMemPoolTrimTo(pool, 0));
    SAME(sim_free(), device_bytes - 10 * MIB);
    OK(cuMemFree_v2(first));
    OK(cuMemPoolTrimTo(pool, 0));
    SAME(sim_free(), device_bytes);
    SAME(of_pool(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 128 * MIB);
    /* The last of the device, though less than a chunk. */
    OK(cuMemAllocAsync(&first, 1000 * MIB, NULL));
    OK(cuMemAllocAsync(&second, 24 * MIB, NULL));
    SAME(sim_free(), 0);
    EXPECT(cuMemAllocAsync(&second, MIB, NULL), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuDevicePrimaryCtxReset_v2(0));
    CUcontext context;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    SAME(sim_free(), device_bytes);
    OK(cuMemPoolCreate(&own, &properties));
    OK(cuMemAllocFromPoolAsync(&first, MIB, own, NULL));
    OK(cuMemPoolDestroy(own));
    SAME(sim_free(), device_bytes - 2 * MIB);
    OK(cuMemFreeAsync(first, NULL));
    SAME(sim_free(), device_bytes);
    EXPECT(cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
}

static void virtual_memory(void)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle, again;
    CUdeviceptr space, other;
    size_t unit;
    unsigned char byte = 0;
    OK(cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    SAME(unit, 2 * MIB);
    OK(cuMemAddressReserve(&space, 64 * MIB, 0, 0, 0));
    OK(cuMemAddressReserve(&other, 64 * MIB, 0, 0, 0));
    EXPECT(cuMemCreate(&handle, MIB, &properties, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuMemCreate(&handle, 2 * device_bytes, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cuMemCreate(&handle, 32 * MIB, &properties, 0));
    SAME(sim_free(), device_bytes - 32 * MIB);
    OK(cuMemMap(space, 32 * MIB, 0, handle, 0));
    EXPECT(cuMemMap(space, 32 * MIB, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(other + 2 * MIB, 32 * MIB, 0, handle, 0));
    EXPECT(cuMemsetD8_v2(space, 5, 1), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemSetAccess(space, 32 * MIB, &access, 1));
    OK(cuMemSetAccess(other + 2 * MIB, 32 * MIB, &access, 1));
    OK(cuMemsetD8_v2(space + 100, 5, 1));
    OK(cuMemcpyDtoH_v2(&byte, other + 2 * MIB + 100, 1));
    SAME(byte, 5);
    OK(cuMemRelease(handle));
    SAME(sim_free(), device_bytes - 32 * MIB);
    EXPECT(cuMemAddressFree(space, 64 * MIB), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemUnmap(space, 32 * MIB));
    SAME(sim_free(), device_bytes - 32 * MIB);
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(other + 3 * MIB)));
    OK(cuMemUnmap(other + 2 * MIB, 32 * MIB));
    SAME(sim_free(), device_bytes - 32 * MIB);
    OK(cuMemRelease(again));
    SAME(sim_free(), device_bytes);
    OK(cuMemAddressFree(space, 64 * MIB));
    OK(cuMemAddressFree(other, 64 * MIB));
}

/* ---- contexts ------------------------------------------------------------------------------------------- */

static void contexts(void)
{
    CUcontext primary, own, got;
    CUdeviceptr address;
    CUdevice device = 7;
    unsigned int flags;
    int active;
    OK(cuCtxGetCurrent(&primary));
    OK(cuCtxCreate_v2(&own, 0, 0));
    OK(cuCtxGetCurrent(&got));
    TRUE(got == own && own != primary);
    OK(cuCtxGetDevice(&device));
    SAME(device, 0);
    OK(cuMemAlloc_v2(&address, MIB));
    OK(cuCtxPushCurrent_v2(primary));
    OK(cuCtxPopCurrent_v2(&got));
    TRUE(got == primary);
    OK(cuCtxDestroy_v2(own));
    OK(cuCtxGetCurrent(&got));
    TRUE(got == primary);
    SAME(sim_free(), device_bytes);
    EXPECT(cuCtxSetCurrent(own), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT(cuCtxDestroy_v2(primary), CUDA_ERROR_INVALID_CONTEXT);
    OK(cuMemAlloc_v2(&address, MIB));
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    SAME(active, 1);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    SAME(active, 0);
    EXPECT(cuMemAlloc_v2(&address, MIB), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cuCtxSetCurrent(NULL));
    EXPECT(cuMemAlloc_v2(&address, MIB), CUDA_ERROR_INVALID_CONTEXT);
    sim_start();
    SAME(sim_free(), device_bytes);
    CUctxCreateParams parameters = {0};
    OK(cuCtxCreate_v4(&own, &parameters, 0, 0));
    OK(cuCtxDestroy_v2(own));
    OK(cuCtxCreate_v3(&own, NULL, 0, 0, 0));
    OK(cuCtxDestroy_v2(own));
    EXPECT(cuCtxCreate_v2(&own, 0, 5), CUDA_ERROR_INVALID_DEVICE);
}

static void green_contexts(void)
{
    CUdevResource whole;
    CUdevResourceDesc description;
    CUgreenCtx green;
    CUcontext context;
    OK(cuDeviceGetDevResource(0, &whole, CU_DEV_RESOURCE_TYPE_SM));
    OK(cuDevResourceGenerateDesc(&description, &whole, 1));
    OK(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    OK(cuCtxFromGreenCtx(&context, green));
    OK(cuCtxSetCurrent(context));
    sim_launch(sim_kernel("spin_10us"), NULL);
    OK(cuCtxSynchronize());
    OK(cuGreenCtxDestroy(green));
}

/* ---- time ------------------------------------------------------------------------------------------------- */

static void streams(void)
{
    CUstream one, two, independent;
    CUevent event, start, end;
    float milliseconds;
    CUfunction kernel = sim_kernel("spin_20ms"), nothing = sim_kernel("spin_0us");
    OK(cuStreamCreate(&one, CU_STREAM_DEFAULT));
    OK(cuStreamCreate(&two, CU_STREAM_DEFAULT));
    OK(cuStreamCreate(&independent, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, 0));
    OK(cuEventCreate(&start, 0));
    OK(cuEventCreate(&end, 0));
    OK(cuStreamQuery(one));
    OK(cuEventQuery(event));
    EXPECT(cuEventElapsedTime(&milliseconds, start, end), CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventRecord(start, one));
    sim_launch(kernel, one);
    sim_launch(kernel, one);
    OK(cuEventRecord(end, one));
    EXPECT(cuEventElapsedTime(&milliseconds, start, end), CUDA_ERROR_NOT_READY);
    EXPECT(cuStreamQuery(one), CUDA_ERROR_NOT_READY);
    EXPECT(cuEventQuery(end), CUDA_ERROR_NOT_READY);
    OK(cuStreamQuery(two));
    OK(cuStreamQuery(independent));
    /* The legacy stream waits for blocking streams. */
    EXPECT(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    EXPECT(cuStreamQuery(CU_STREAM_LEGACY), CUDA_ERROR_NOT_READY);
    OK(cuStreamQuery_ptsz(NULL));
    OK(cuStreamWaitEvent(two, end, 0));
    EXPECT(cuStreamQuery(two), CUDA_ERROR_NOT_READY);
    OK(cuStreamSynchronize(two));
    OK(cuEventQuery(end));
    OK(cuStreamQuery(one));
    OK(cuEventElapsedTime(&milliseconds, start, end));
    TRUE(milliseconds >= 40.0f);
    sim_launch(kernel, NULL);
    EXPECT(cuStreamQuery(one), CUDA_ERROR_NOT_READY);
    OK(cuStreamQuery(independent));
    OK(cuCtxSynchronize());
    OK(cuStreamQuery(NULL));
    for (int i = 0; i < 5000; i++)
        sim_launch(nothing, one);
    OK(cuStreamSynchronize(one));
    OK(cuStreamDestroy_v2(one));
    OK(cuStreamDestroy_v2(two));
    OK(cuStreamDestroy_v2(independent));
    OK(cuEventDestroy_v2(event));
    EXPECT(cuLaunchKernel(kernel, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuLaunchKernel(kernel, 1, 1, 1, 2000, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    EXPECT(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), CUDA_ERROR_INVALID_HANDLE);
}

/* A stream takes 1024 kernels; the next launch waits until the first of them is done. */
static void depth(void)
{
    CUstream stream;
    CUevent first;
    CUfunction kernel = sim_kernel("spin_50us"), long_one = sim_kernel("spin_500ms");
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&first, 0));
    sim_launch(long_one, stream);
    OK(cuEventRecord(first, stream));
    for (int i = 0; i < 1023; i++)
        sim_launch(kernel, stream);
    EXPECT(cuEventQuery(first), CUDA_ERROR_NOT_READY);
    sim_launch(kernel, stream);
    OK(cuEventQuery(first));
    OK(cuStreamSynchronize(stream));
}

static int called;

static void call(void *data)
{
    usleep(20000);
    called += *(int *)data;
}

static void on_stream(CUstream stream, CUresult result, void *data)
{
    (void)stream;
    called += result == CUDA_SUCCESS ? *(int *)data * 10 : 0;
}

static void host_functions(void)
{
    int one = 1;
    CUstream stream;
    OK(cuStreamCreate(&stream, 0));
    sim_launch(sim_kernel("spin_10ms"), stream);
    OK(cuLaunchHostFunc(stream, call, &one));
    OK(cuStreamAddCallback(stream, on_stream, &one, 0));
    EXPECT(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
    OK(cuStreamSynchronize(stream));
    SAME(called, 11);
    OK(cuStreamDestroy_v2(stream));
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

static CUgraph captured(CUstream stream, CUdeviceptr *address, CUfunction kernel)
{
    CUgraph graph;
    CUstreamCaptureStatus status;
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(cuStreamIsCapturing(stream, &status));
    SAME(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    if (address)
        OK(cuMemAllocAsync(address, 100 * MIB, stream));
    sim_launch(kernel, stream);
    if (address)
        OK(cuMemFreeAsync(*address, stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuStreamIsCapturing(stream, &status));
    SAME(status, CU_STREAM_CAPTURE_STATUS_NONE);
    return graph;
}

static cuuint64_t of_graphs(CUgraphMem_attribute attribute)
{
    cuuint64_t value;
    OK(cuDeviceGetGraphMemAttribute(0, attribute, &value));
    return value;
}

static void graphs(void)
{
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    CUgraphNode nodes[8];
    CUgraphNodeType type;
    CUevent start, end;
    CUdeviceptr address;
    float milliseconds;
    size_t count = 8;
    CUfunction kernel = sim_kernel("spin_10ms");
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&start, 0));
    OK(cuEventCreate(&end, 0));
    graph = captured(stream, &address, kernel);
    OK(cuGraphGetNodes(graph, nodes, &count));
    SAME(count, 3);
    OK(cuGraphNodeGetType(nodes[0], &type));
    SAME(type, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    SAME(sim_free(), device_bytes);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    SAME(sim_free(), device_bytes);
    OK(cuEventRecord(start, stream));
    OK(cuGraphLaunch(exec, stream));
    OK(cuGraphLaunch(exec, stream));
    OK(cuEventRecord(end, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuEventElapsedTime(&milliseconds, start, end));
    TRUE(milliseconds >= 20.0f);
    SAME(sim_free(), device_bytes - 100 * MIB);
    SAME(of_graphs(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), 100 * MIB);
    SAME(of_graphs(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
    SAME(of_graphs(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 100 * MIB);
    OK(cuDeviceGraphMemTrim(0));
    SAME(sim_free(), device_bytes);
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));

    /* Memory that the graph leaves to its user. */
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                       .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
                                         .bytesize = 10 * MIB};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&nodes[0], graph, NULL, 0, &memory));
    TRUE(memory.dptr);
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphLaunch(exec, stream));
    OK(cuMemsetD8_v2(memory.dptr, 1, 10 * MIB));
    EXPECT(cuGraphLaunch(exec, stream), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemFreeAsync(memory.dptr, stream));
    OK(cuGraphLaunch(exec, stream));
    OK(cuMemFree_v2(memory.dptr));
    SAME(of_graphs(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT), 0);
    OK(cuDeviceGraphMemTrim(0));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    memory.bytesize = 2 * device_bytes;
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&nodes[0], graph, NULL, 0, &memory));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(cuGraphLaunch(exec, stream), CUDA_ERROR_OUT_OF_MEMORY);
    SAME(sim_free(), device_bytes);
}

static void capture(void)
{
    CUstream one, two;
    CUgraph graph;
    CUevent event, other;
    CUdeviceptr address;
    size_t count = 0;
    CUfunction kernel = sim_kernel("spin_1us");
    OK(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, 0));
    OK(cuEventCreate(&other, 0));
    /* A second stream joins and is joined. */
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuEventRecord(event, one));
    OK(cuStreamWaitEvent(two, event, 0));
    sim_launch(kernel, two);
    OK(cuEventRecord(other, two));
    sim_launch(kernel, one);
    OK(cuStreamWaitEvent(one, other, 0));
    sim_launch(kernel, one);
    OK(cuStreamEndCapture(one, &graph));
    OK(cuGraphGetNodes(graph, NULL, &count));
    SAME(count, 3);
    OK(cuStreamQuery(two));
    OK(cuGraphDestroy(graph));
    EXPECT(cuEventQuery(event), CUDA_ERROR_CAPTURED_EVENT);
    /* What breaks a capture. */
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(cuStreamSynchronize(one), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT(cuStreamEndCapture(one, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    TRUE(graph == NULL);
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(cuMemAlloc_v2(&address, MIB), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT(cuStreamEndCapture(one, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuMemAlloc_v2(&address, MIB));
    OK(cuStreamEndCapture(one, &graph));
    OK(cuGraphDestroy(graph));
    OK(cuMemFree_v2(address));
    OK(cuStreamBeginCapture_v2(one, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuEventRecord(event, one));
    OK(cuStreamWaitEvent(two, event, 0));
    sim_launch(kernel, two);
    EXPECT(cuStreamEndCapture(two, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    EXPECT(cuStreamEndCapture(one, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT(cuStreamEndCapture(one, &graph), CUDA_ERROR_ILLEGAL_STATE);
    EXPECT(cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    OK(cuStreamQuery(two));
}

/* ---- finding functions ------------------------------------------------------------------------------------------ */

static void *found(const char *name, int version, int flags)
{
    void *address;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress_v2(name, &address, version, (cuuint64_t)flags, &status));
    SAME(status == CU_GET_PROC_ADDRESS_SUCCESS, address != NULL);
    return address;
}

static void lookup(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *address;
    CUdriverProcAddressQueryResult status;
    TRUE(found("cuMemAlloc", 13000, 0) == dlsym(library, "cuMemAlloc_v2"));
    TRUE(found("cuMemAlloc", 13000, 2) == (void *)cuMemAlloc_v2);
    TRUE(found("cuMemAlloc", 3010, 0) == (void *)cuMemAlloc);
    TRUE(found("cuLaunchKernel", 13000, 0) == (void *)cuLaunchKernel);
    TRUE(found("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_LEGACY_STREAM) == (void *)cuLaunchKernel);
    TRUE(found("cuLaunchKernel", 13000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) == (void *)cuLaunchKernel_ptsz);
    TRUE(found("cuMemcpyHtoD", 13000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) == (void *)cuMemcpyHtoD_v2_ptds);
    TRUE(found("cuCtxCreate", 11000, 0) == (void *)cuCtxCreate_v2);
    TRUE(found("cuCtxCreate", 12000, 0) == (void *)cuCtxCreate_v3);
    TRUE(found("cuCtxCreate", 13000, 0) == (void *)cuCtxCreate_v4);
    TRUE(found("cuGetProcAddress", 12000, 0) == (void *)cuGetProcAddress_v2);
    TRUE(found("cuGetProcAddress", 11030, 0) == (void *)cuGetProcAddress);
    TRUE(found("cuGraphInstantiate", 12000, 0) == (void *)cuGraphInstantiateWithFlags);
    TRUE(found("cuMemAlloc_v2", 13000, 0) == NULL);
    TRUE(found("cuLaunchKernel_ptsz", 13000, 2) == NULL);
    OK(cuGetProcAddress_v2("cuGreenCtxCreate", &address, 12000, 0, &status));
    SAME(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    OK(cuGetProcAddress_v2("cuNothing", &address, 13000, 0, &status));
    SAME(status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(cuGetProcAddress_v2("cuNothing", &address, 13000, 0, NULL));
    TRUE(address == NULL);
    EXPECT(cuGetProcAddress("cuNothing", &address, 13000, 0), CUDA_ERROR_NOT_FOUND);
    const char *name;
    OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &name));
    SAME(strcmp(name, "CUDA_ERROR_OUT_OF_MEMORY"), 0);
    EXPECT(cuGetErrorName((CUresult)12345, &name), CUDA_ERROR_INVALID_VALUE);
}

static void modules(void)
{
    CUmodule module;
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    int value;
    const char *image = ".version 8.0\n.target sm_90\n// .entry not_this\n"
                        ".visible .entry one(.param .u64 a,\n .param .u32 b) { .reg .b32 %r<3>; ret; }\n"
                        ".visible .entry two()\n{ ret; }\n";
    OK(cuModuleLoadData(&module, image));
    OK(cuModuleGetFunction(&function, module, "one"));
    OK(cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
    SAME(value, 1024);
    EXPECT(cuModuleGetFunction(&function, module, "not_this"), CUDA_ERROR_NOT_FOUND);
    EXPECT(cuModuleGetFunction(&function, module, "three"), CUDA_ERROR_NOT_FOUND);
    OK(cuModuleUnload(module));
    EXPECT(cuModuleUnload(module), CUDA_ERROR_INVALID_HANDLE);
    EXPECT(cuModuleLoadData(&module, "nonsense"), 218);
    EXPECT(cuModuleLoadData(&module, "\1\2\3\4"), CUDA_ERROR_INVALID_IMAGE);
    OK(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryGetKernel(&kernel, library, "two"));
    OK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    OK(cuCtxSynchronize());
    OK(cuLibraryUnload(library));
}

static const struct {
    const char *name;
    void (*run)(void);
} groups[] = {
    {"plain", plain},
    {"old", old},
    {"host_and_managed", host_and_managed},
    {"arrays", arrays},
    {"pools", pools},
    {"virtual_memory", virtual_memory},
    {"contexts", contexts},
    {"green_contexts", green_contexts},
    {"streams", streams},
    {"depth", depth},
    {"host_functions", host_functions},
    {"graphs", graphs},
    {"capture", capture},
    {"lookup", lookup},
    {"modules", modules},
};

int main(int argc, char **argv)
{
    for (unsigned i = 0; i < sizeof groups / sizeof *groups; i++) {
        if (argc == 1)
            puts(groups[i].name);
        else if (!strcmp(argv[1], groups[i].name)) {
            sim_start();
            groups[i].run();
            return 0;
        }
    }
    return argc == 1 ? 0 : 2;
}
