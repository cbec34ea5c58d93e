/* Takes memory in every way until it is refused, and gives it back.
 *
 *     hooks_paths WAY reports          each way of asking for the total, as "name bytes"
 *     hooks_paths WAY fill PATH        "held BYTES", "refused ERROR", "used BYTES" after everything is given back
 *
 * WAY is how functions are found: direct (compiled with -DDIRECT, linked against the driver), dlsym, proc
 * (cuGetProcAddress_v2) or proc1 (cuGetProcAddress). */
#include "cuda_abi.h"
#include "nvml_abi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

static void die(const char *what, int result) {
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}

/* ---- finding functions ---- */

#ifdef DIRECT
#define CALL(name) name
#else
#define CALL(name) ((__typeof__(&name))find(#name))

static const char *way;
static void *cuda, *nvml;

/* The CUDA version since which each plain name means this function. */
static int version_of(const char *name) {
    static const struct {
        const char *name;
        int version;
    } versions[] = {{"cuMemAlloc", 2000},      {"cuMemAllocPitch", 2000},   {"cuMemFree", 2000},
                    {"cuMemGetInfo", 2000},    {"cuDeviceTotalMem", 2000},  {"cuArrayCreate", 2000},
                    {"cuArray3DCreate", 2000}, {"cuGraphAddNode", 12020},   {"cuGraphInstantiate", 10000},
                    {"cuCtxCreate", 2000},     {"cuCtxCreate_v2", 3020},    {"cuCtxCreate_v3", 11040},
                    {"cuCtxDestroy", 2000},    {"cuStreamBeginCapture", 10000},
                    {"cuDevicePrimaryCtxRelease", 7000}, {"cuDevicePrimaryCtxReset", 7000},
                    {"cuGraphInstantiate_v2", 11000}};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        if (strcmp(versions[i].name, name) == 0)
            return versions[i].version;
    return 13000;
}

static void *ask_driver(const char *name) {
    char base[64];
    snprintf(base, sizeof base, "%s", name);
    size_t length = strlen(base);
    cuuint64_t flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    if (length > 5 && strcmp(base + length - 5, "_ptsz") == 0) {
        base[length -= 5] = '\0';
        flags = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    }
    int version = version_of(base);
    if (length > 3 && strncmp(base + length - 3, "_v", 2) == 0)
        base[length - 3] = '\0';
    if (strcmp(base, "cuGraphInstantiateWithFlags") == 0)
        strcpy(base, "cuGraphInstantiate");
    void *found = NULL;
    int result;
    if (strcmp(way, "proc1") == 0)
        result = (int)((__typeof__(&cuGetProcAddress))dlsym(cuda, "cuGetProcAddress"))(base, &found, version, flags);
    else
        result = (int)((__typeof__(&cuGetProcAddress_v2))dlsym(cuda, "cuGetProcAddress_v2"))(base, &found, version,
                                                                                             flags, NULL);
    if (result != 0 || found == NULL)
        die(name, result);
    return found;
}

static void *find(const char *name) {
    bool of_nvml = strncmp(name, "nvml", 4) == 0;
    void *found = strcmp(way, "dlsym") == 0 || of_nvml ? dlsym(of_nvml ? nvml : cuda, name) : ask_driver(name);
    if (found == NULL)
        die(name, -1);
    return found;
}

#endif

static void check(const char *what, CUresult result) {
    if (result != CUDA_SUCCESS)
        die(what, (int)result);
}

#define CHECK(name, ...) check(#name, CALL(name)(__VA_ARGS__))

/* ---- ways of taking memory ---- */

struct held {
    size_t bytes; /* what was really taken */
    CUdeviceptr address;
    void *object;
};

static CUdevice device;
static CUstream stream;
static CUmemoryPool pool;
static CUgraph allocating; /* the graph with nodes that allocate */

struct path {
    const char *name;
    CUresult (*take)(struct held *, size_t);
    void (*give)(struct held *);
};

static CUresult take_plain(struct held *held, size_t bytes) {
    return CALL(cuMemAlloc_v2)(&held->address, bytes);
}

static void give_plain(struct held *held) {
    CHECK(cuMemFree_v2, held->address);
}

static CUresult take_plain_v1(struct held *held, size_t bytes) {
    CUdeviceptr_v1 address = 0;
    CUresult result = CALL(cuMemAlloc)(&address, (unsigned int)bytes);
    held->address = address;
    return result;
}

static void give_plain_v1(struct held *held) {
    CHECK(cuMemFree, (CUdeviceptr_v1)held->address);
}

static CUresult take_pitched(struct held *held, size_t bytes) {
    size_t pitch = 0;
    return CALL(cuMemAllocPitch_v2)(&held->address, &pitch, 4096, bytes / 4096, 4);
}

/* A third of each line is padding. */
static CUresult take_padded(struct held *held, size_t bytes) {
    size_t pitch = 0;
    CUresult result = CALL(cuMemAllocPitch_v2)(&held->address, &pitch, 700, bytes / 1024, 4);
    held->bytes = pitch * (bytes / 1024);
    return result;
}

static CUresult take_pitched_v1(struct held *held, size_t bytes) {
    unsigned int pitch = 0;
    CUdeviceptr_v1 address = 0;
    CUresult result = CALL(cuMemAllocPitch)(&address, &pitch, 4096, (unsigned int)(bytes / 4096), 4);
    held->address = address;
    return result;
}

static CUresult take_managed(struct held *held, size_t bytes) {
    return CALL(cuMemAllocManaged)(&held->address, bytes, CU_MEM_ATTACH_GLOBAL);
}

static CUresult take_managed_host(struct held *held, size_t bytes) {
    return CALL(cuMemAllocManaged)(&held->address, bytes, CU_MEM_ATTACH_HOST);
}

static CUresult take_async(struct held *held, size_t bytes) {
    return CALL(cuMemAllocAsync)(&held->address, bytes, stream);
}

static CUresult take_async_ptsz(struct held *held, size_t bytes) {
    return CALL(cuMemAllocAsync_ptsz)(&held->address, bytes, NULL);
}

static CUresult take_from_pool(struct held *held, size_t bytes) {
    return CALL(cuMemAllocFromPoolAsync)(&held->address, bytes, pool, stream);
}

static CUresult take_from_pool_ptsz(struct held *held, size_t bytes) {
    return CALL(cuMemAllocFromPoolAsync_ptsz)(&held->address, bytes, pool, NULL);
}

static void give_async(struct held *held) {
    CHECK(cuMemFreeAsync, held->address, stream);
}

static void give_async_ptsz(struct held *held) {
    CHECK(cuMemFreeAsync_ptsz, held->address, NULL);
}

static const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static CUresult take_created(struct held *held, size_t bytes) {
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = CALL(cuMemCreate)(&handle, bytes, &on_device, 0);
    held->object = (void *)(uintptr_t)handle;
    return result;
}

static void give_created(struct held *held) {
    CHECK(cuMemRelease, (CUmemGenericAllocationHandle)(uintptr_t)held->object);
}

/* Its handle is released at once, so only the mapping holds it. */
static CUresult take_mapped(struct held *held, size_t bytes) {
    CUresult result = take_created(held, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    CHECK(cuMemAddressReserve, &held->address, bytes, 0, 0, 0);
    CHECK(cuMemMap, held->address, bytes, 0, (CUmemGenericAllocationHandle)(uintptr_t)held->object, 0);
    give_created(held);
    return result;
}

static void give_mapped(struct held *held) {
    CHECK(cuMemUnmap, held->address, held->bytes);
    CHECK(cuMemAddressFree, held->address, held->bytes);
}

static unsigned int part(size_t elements, unsigned int of, unsigned int parts) {
    unsigned int bits = (unsigned int)(63 - __builtin_clzll(elements));
    return 1u << (bits / parts + (of < bits % parts));
}

static CUresult take_array(struct held *held, size_t bytes) {
    CUDA_ARRAY_DESCRIPTOR plane = {part(bytes / 16, 0, 2), part(bytes / 16, 1, 2), CU_AD_FORMAT_UNSIGNED_INT32, 4};
    return CALL(cuArrayCreate_v2)((CUarray *)&held->object, &plane);
}

static CUresult take_array_v1(struct held *held, size_t bytes) {
    CUDA_ARRAY_DESCRIPTOR_v1 plane = {part(bytes / 16, 0, 2), part(bytes / 16, 1, 2), CU_AD_FORMAT_FLOAT, 4};
    return CALL(cuArrayCreate)((CUarray *)&held->object, &plane);
}

static CUresult take_space(struct held *held, size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR space = {part(bytes / 8, 0, 3), part(bytes / 8, 1, 3), part(bytes / 8, 2, 3),
                                     CU_AD_FORMAT_HALF,     4,                     0};
    return CALL(cuArray3DCreate_v2)((CUarray *)&held->object, &space);
}

static CUresult take_space_v1(struct held *held, size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR_v1 space = {part(bytes / 8, 0, 3), part(bytes / 8, 1, 3),      part(bytes / 8, 2, 3),
                                        CU_AD_FORMAT_SIGNED_INT16, 4, 0};
    return CALL(cuArray3DCreate)((CUarray *)&held->object, &space);
}

static void give_array(struct held *held) {
    CHECK(cuArrayDestroy, held->object);
}

static CUresult take_mipmapped(struct held *held, size_t bytes) {
    size_t base = bytes / 2;
    CUDA_ARRAY3D_DESCRIPTOR plane = {part(base, 0, 2), part(base, 1, 2), 0, CU_AD_FORMAT_SIGNED_INT8, 1, 0};
    held->bytes = base + base / 4 + base / 16;
    if (held->bytes > MIB) /* the driver gives whole pages */
        held->bytes = (held->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    return CALL(cuMipmappedArrayCreate)((CUmipmappedArray *)&held->object, &plane, 3);
}

static void give_mipmapped(struct held *held) {
    CHECK(cuMipmappedArrayDestroy, held->object);
}

/* What a graph allocates stays allocated after the launch, as no node frees it. */
static CUresult launch(struct held *held, CUgraph graph) {
    CUgraphExec executable = NULL;
    CUresult result = CALL(cuGraphInstantiateWithFlags)(&executable, graph, 0);
    CHECK(cuGraphDestroy, graph);
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuGraphLaunch)(executable, stream);
    if (result != CUDA_SUCCESS) {
        CHECK(cuGraphExecDestroy, executable);
        return result;
    }
    CHECK(cuStreamSynchronize, stream);
    held->object = executable;
    return result;
}

static CUresult take_node(struct held *held, size_t bytes) {
    CUDA_MEM_ALLOC_NODE_PARAMS node = {.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                                     .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}},
                                       .bytesize = bytes};
    CUgraphNode added;
    CHECK(cuGraphCreate, &allocating, 0);
    CUresult result = CALL(cuGraphAddMemAllocNode)(&added, allocating, NULL, 0, &node);
    held->address = node.dptr;
    return result == CUDA_SUCCESS ? launch(held, allocating) : result;
}

static CUgraphNodeParams node_of(size_t bytes) {
    CUgraphNodeParams node = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
    node.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    node.alloc.poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device};
    node.alloc.bytesize = bytes;
    return node;
}

static CUresult take_any_node(struct held *held, size_t bytes) {
    CUgraphNodeParams node = node_of(bytes);
    CUgraphNode added;
    CHECK(cuGraphCreate, &allocating, 0);
    CUresult result = CALL(cuGraphAddNode)(&added, allocating, NULL, 0, &node);
    held->address = node.alloc.dptr;
    return result == CUDA_SUCCESS ? launch(held, allocating) : result;
}

static CUresult take_any_node_v2(struct held *held, size_t bytes) {
    CUgraphNodeParams node = node_of(bytes);
    CUgraphNode added;
    CHECK(cuGraphCreate, &allocating, 0);
    CUresult result = CALL(cuGraphAddNode_v2)(&added, allocating, NULL, NULL, 0, &node);
    held->address = node.alloc.dptr;
    return result == CUDA_SUCCESS ? launch(held, allocating) : result;
}

static CUresult take_captured(struct held *held, size_t bytes) {
    CHECK(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUresult result = CALL(cuMemAllocAsync)(&held->address, bytes, stream);
    CHECK(cuStreamEndCapture, stream, &allocating);
    if (result == CUDA_SUCCESS)
        return launch(held, allocating);
    if (allocating != NULL)
        CHECK(cuGraphDestroy, allocating);
    return result;
}

static void give_graph(struct held *held) {
    CHECK(cuMemFree_v2, held->address);
    CHECK(cuGraphExecDestroy, held->object);
}

static const struct path paths[] = {
    {"plain", take_plain, give_plain},
    {"plain_v1", take_plain_v1, give_plain_v1},
    {"plain_freed_async", take_plain, give_async},
    {"pitched", take_pitched, give_plain},
    {"padded", take_padded, give_plain},
    {"pitched_v1", take_pitched_v1, give_plain_v1},
    {"managed", take_managed, give_plain},
    {"managed_host", take_managed_host, give_plain},
    {"async", take_async, give_async},
    {"async_ptsz", take_async_ptsz, give_async_ptsz},
    {"async_freed_plain", take_async, give_plain},
    {"from_pool", take_from_pool, give_async},
    {"from_pool_ptsz", take_from_pool_ptsz, give_async_ptsz},
    {"created", take_created, give_created},
    {"mapped", take_mapped, give_mapped},
    {"array", take_array, give_array},
    {"array_v1", take_array_v1, give_array},
    {"space", take_space, give_array},
    {"space_v1", take_space_v1, give_array},
    {"mipmapped", take_mipmapped, give_mipmapped},
    {"graph_node", take_node, give_graph},
    {"graph_any_node", take_any_node, give_graph},
    {"graph_any_node_v2", take_any_node_v2, give_graph},
    {"graph_captured", take_captured, give_graph},
};

static const struct path *path_named(const char *name) {
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (strcmp(paths[i].name, name) == 0)
            return &paths[i];
    die(name, -1);
    return NULL;
}

/* ---- fill ---- */

static void fill(const struct path *path, size_t largest) {
    static struct held held[256];
    size_t count = 0, sum = 0;
    CUresult refused = CUDA_SUCCESS;
    size_t least = strcmp(path->name, "created") == 0 || strcmp(path->name, "mapped") == 0 ? 2 * MIB : MIB;
    for (size_t step = largest; step >= least && count < sizeof held / sizeof *held;) {
        held[count] = (struct held){.bytes = step};
        CUresult result = path->take(&held[count], step);
        if (result == CUDA_SUCCESS) {
            sum += held[count++].bytes;
        } else {
            refused = result;
            step /= 2;
        }
    }
    printf("held %zu\nrefused %d\n", sum, (int)refused);
    while (count-- > 0)
        path->give(&held[count]);
    CHECK(cuStreamSynchronize, stream);
    CHECK(cuStreamSynchronize_ptsz, NULL);
    if (pool != NULL)
        CHECK(cuMemPoolTrimTo, pool, 0);
    if (strncmp(path->name, "graph", 5) == 0)
        CHECK(cuDeviceGraphMemTrim, device);
    size_t unused, total;
    CHECK(cuMemGetInfo_v2, &unused, &total);
    printf("used %zu\n", total - unused);
}

/* ---- reports ---- */

static void reports(void) {
    unsigned int narrow, narrow_unused;
    size_t wide, unused;
    CHECK(cuDeviceTotalMem_v2, &wide, device);
    printf("cuDeviceTotalMem_v2 %zu\n", wide);
    CHECK(cuDeviceTotalMem, &narrow, device);
    printf("cuDeviceTotalMem %u\n", narrow);
    CHECK(cuMemGetInfo_v2, &unused, &wide);
    printf("cuMemGetInfo_v2 %zu\nfree %zu\n", wide, unused);
    CHECK(cuMemGetInfo, &narrow_unused, &narrow);
    printf("cuMemGetInfo %u\nfree_v1 %u\n", narrow, narrow_unused);
    nvmlDevice_t handle;
    nvmlMemory_t memory;
    nvmlMemory_v2_t memory_v2 = {.version = nvmlMemory_v2};
    if (CALL(nvmlInit_v2)() != NVML_SUCCESS || CALL(nvmlDeviceGetHandleByIndex_v2)(0, &handle) != NVML_SUCCESS)
        die("nvml", 1);
    int result = (int)CALL(nvmlDeviceGetMemoryInfo)(handle, &memory);
    printf("nvmlDeviceGetMemoryInfo %llu\n", result ? 0ULL : memory.total);
    printf("nvml_sum %llu\n", memory.free + memory.used);
    result = (int)CALL(nvmlDeviceGetMemoryInfo_v2)(handle, &memory_v2);
    printf("nvmlDeviceGetMemoryInfo_v2 %llu\n", result ? 0ULL : memory_v2.total);
    printf("nvml_sum_v2 %llu\n", memory_v2.free + memory_v2.used + memory_v2.reserved);
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
#ifndef DIRECT
    way = arguments[1];
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (cuda == NULL || nvml == NULL)
        die(dlerror(), -1);
#endif
    CUcontext context;
    CHECK(cuInit, 0);
    CHECK(cuDeviceGet, &device, 0);
    CHECK(cuDevicePrimaryCtxRetain, &context, device);
    CHECK(cuCtxSetCurrent, context);
    CHECK(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    if (strcmp(arguments[2], "reports") == 0) {
        reports();
    } else if (strcmp(arguments[2], "fill") == 0) {
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
        if (strncmp(arguments[3], "from_pool", 9) == 0)
            CHECK(cuMemPoolCreate, &pool, &properties);
        const struct path *path = path_named(arguments[3]);
        size_t length = strlen(path->name);
        bool narrow = length > 3 && strcmp(path->name + length - 3, "_v1") == 0;
        fill(path, narrow ? 512 * MIB : (size_t)1 << 36);
        if (pool != NULL)
            CHECK(cuMemPoolDestroy, pool);
    }
    CHECK(cuStreamDestroy_v2, stream);
    CHECK(cuDevicePrimaryCtxRelease_v2, device);
    return 0;
}
