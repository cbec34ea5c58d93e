/* The table of hooks: every name that libfgpu intercepts is here, once. It generates the exported functions, the names
 * that dlsym() looks for, the addresses that cuGetProcAddress() swaps, and the places of the real functions.
 *
 * A line is HOOK(library, name, parameters, call). `call` is an expression in which `real` is the driver's function of
 * that name; versions of a function share what they call and differ in `real`. The file that implements a group of
 * lines ends with the group's expansion, so that the called functions can be static:
 *
 *     FGPU_MEMORY_HOOKS(FGPU_EXPORT_HOOK)
 *
 * launch.c does this with FGPU_LAUNCH_HOOKS and defines what they call before it, each with the signature in the lines:
 * launch_kernel(real, per_thread, ...), and so on. Functions of the driver that are called but not hooked are in
 * FGPU_CALLS; DRIVER(name) is the real function of both kinds, NULL if the driver lacks it.
 *
 * While the session is parked, every function that needs the GPU waits before the driver is called (parking.c): those
 * of a group that is expanded with FGPU_EXPORT_GATED_HOOK, launches, and those in gated.h, which do nothing else.
 *
 * Versions: a name without a suffix is the first version (32-bit sizes and device addresses if there is a _v2); _ptsz
 * means that the NULL stream is the thread's own.
 *
 * Not hooked, although they involve device memory:
 * - cuIpcOpenMemHandle, cuMemImportFromShareableHandle, cuMemPoolImport*, cuImportExternalMemory, cuExternalMemoryGet*,
 *   cuGraphics*, cuEGL*: another process or library has allocated what these map. (A process that exports memory and
 *   then frees it or ends, while a descriptor or an importer remains, leaves it uncharged.)
 * - cuMulticastCreate, -Bind*, -AddDevice: an address range over memory of cuMemCreate, which is charged there. (Memory
 *   that is bound and then released stays bound uncharged.)
 * - cuModuleLoad*, cuLibraryLoad*, cuLinkComplete: code and global variables, of a size that only the driver knows:
 *   code.c asks NVML for it. Likewise what cuCtxSetLimit takes for stacks and for launches by kernels, what the driver takes for kernels with
 *   large stacks, and streams, events, textures.
 * - cuMemAllocHost, cuMemHostAlloc, cuMemHostRegister: host memory. cuMemPrefetch*, cuMemAdvise: managed memory, which
 *   is charged when it is allocated.
 * - cuCheckpointProcess*: the host parks a session by them. Checkpointed memory stays charged, so that the session has
 *   room for it when it comes back; what the session's slice is meanwhile is the scheduler's.
 * - cuGetExportTable: private to NVIDIA's own libraries. CUDA's runtime may make the primary context by a function from
 *   there; contexts.c charges it when it notices it.
 * - cuDeviceSetMemPool and cuMemSetMemPool allocate nothing; the pool is looked up at each allocation.
 *
 * The host's watchdog, which asks the driver, covers these. */
#ifndef FGPU_HOOKS_H
#define FGPU_HOOKS_H

#include "cuda_abi.h"
#include "fgpu.h"
#include "gated.h"
#include "nvml_abi.h"

#include <stdatomic.h>

/* ---- libc and the lookup of functions: resolve.c --------------------------------------------------- */

/* Written out in resolve.c, as they must end in jumps to libc's. */
#define FGPU_LIBC_HOOKS(HOOK) \
    HOOK(LIBC, dlsym, , ) \
    HOOK(LIBC, dlvsym, , ) \
    HOOK(LIBC, dlopen, , ) \
    HOOK(LIBC, dlmopen, , )

#define FGPU_LOOKUP_HOOKS(HOOK) \
    HOOK(CUDA, cuGetProcAddress, (const char *symbol, void **function, int version, cuuint64_t flags), \
         swap(symbol, function, NULL, CUDA_ERROR_NOT_FOUND, real(symbol, function, version, flags))) \
    HOOK(CUDA, cuGetProcAddress_v2, \
         (const char *symbol, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status), \
         swap(symbol, function, status, CUDA_SUCCESS, real(symbol, function, version, flags, status)))

/* ---- devices.c ------------------------------------------------------------------------------------- */

#define FGPU_DEVICE_HOOKS(HOOK) HOOK(CUDA, cuInit, (unsigned int flags), (name_devices(), real(flags)))

/* ---- memory.c -------------------------------------------------------------------------------------- */

#define FGPU_MEMORY_HOOKS(HOOK) \
    HOOK(CUDA, cuMemAlloc, (CUdeviceptr_v1 *address, unsigned int bytes), allocate_v1(real, address, bytes)) \
    HOOK(CUDA, cuMemAlloc_v2, (CUdeviceptr *address, size_t bytes), allocate(real, address, bytes)) \
    HOOK(CUDA, cuMemAllocPitch, \
         (CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element), \
         allocate_pitched_v1(real, address, pitch, width, height, element)) \
    HOOK(CUDA, cuMemAllocPitch_v2, \
         (CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element), \
         allocate_pitched(real, address, pitch, width, height, element)) \
    HOOK(CUDA, cuMemAllocManaged, (CUdeviceptr *address, size_t bytes, unsigned int flags), \
         allocate_managed(real, address, bytes, flags)) \
    HOOK(CUDA, cuMemFree, (CUdeviceptr_v1 address), free_v1(real, address)) \
    HOOK(CUDA, cuMemFree_v2, (CUdeviceptr address), free_v2(real, address))

/* ---- pools.c: memory in the order of streams -------------------------------------------------------- */

#define FGPU_POOL_HOOKS(HOOK) \
    HOOK(CUDA, cuMemAllocAsync, (CUdeviceptr *address, size_t bytes, CUstream stream), \
         allocate_async(real, false, address, bytes, stream)) \
    HOOK(CUDA, cuMemAllocAsync_ptsz, (CUdeviceptr *address, size_t bytes, CUstream stream), \
         allocate_async(real, true, address, bytes, stream)) \
    HOOK(CUDA, cuMemAllocFromPoolAsync, (CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream), \
         allocate_from_pool(real, false, address, bytes, pool, stream)) \
    HOOK(CUDA, cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream), \
         allocate_from_pool(real, true, address, bytes, pool, stream)) \
    HOOK(CUDA, cuMemFreeAsync, (CUdeviceptr address, CUstream stream), free_async(real, address, stream)) \
    HOOK(CUDA, cuMemFreeAsync_ptsz, (CUdeviceptr address, CUstream stream), free_async(real, address, stream)) \
    HOOK(CUDA, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *properties), \
         create_pool(real, pool, properties)) \
    HOOK(CUDA, cuMemPoolDestroy, (CUmemoryPool pool), destroy_pool(real, pool)) \
    HOOK(CUDA, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), trim_pool(real, pool, keep)) \
    HOOK(CUDA, cuMemGetDefaultMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type), \
         get_pool(real, pool, location, type)) \
    HOOK(CUDA, cuMemGetMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type), \
         get_pool(real, pool, location, type)) \
    /* Pools give memory back to the device when a program waits; before that, its launches are measured. */ \
    HOOK(CUDA, cuStreamSynchronize, (CUstream stream), wait_for_stream(real, false, stream)) \
    HOOK(CUDA, cuStreamSynchronize_ptsz, (CUstream stream), wait_for_stream(real, true, stream)) \
    HOOK(CUDA, cuEventSynchronize, (CUevent event), waited(real(event))) \
    HOOK(CUDA, cuCtxSynchronize, (void), waited(real())) \
    HOOK(CUDA, cuCtxSynchronize_v2, (CUcontext context), waited(real(context)))

/* ---- virtual.c: memory that is mapped by the program ------------------------------------------------- */

#define FGPU_VIRTUAL_HOOKS(HOOK) \
    HOOK(CUDA, cuMemCreate, \
         (CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties, \
          unsigned long long flags), \
         create(real, handle, bytes, properties, flags)) \
    HOOK(CUDA, cuMemRelease, (CUmemGenericAllocationHandle handle), release(real, handle)) \
    HOOK(CUDA, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *handle, void *address), \
         retain(real, handle, address)) \
    HOOK(CUDA, cuMemMap, \
         (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, \
          unsigned long long flags), \
         map(real, address, bytes, offset, handle, flags)) \
    HOOK(CUDA, cuMemUnmap, (CUdeviceptr address, size_t bytes), unmap(real, address, bytes)) \
    HOOK(CUDA, cuMemMapArrayAsync, (CUarrayMapInfo *list, unsigned int count, CUstream stream), \
         map_arrays(real, list, count, stream)) \
    HOOK(CUDA, cuMemMapArrayAsync_ptsz, (CUarrayMapInfo *list, unsigned int count, CUstream stream), \
         map_arrays(real, list, count, stream))

/* ---- arrays.c --------------------------------------------------------------------------------------- */

#define FGPU_ARRAY_HOOKS(HOOK) \
    HOOK(CUDA, cuArrayCreate, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *description), \
         create_plane_v1(real, array, description)) \
    HOOK(CUDA, cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *description), \
         create_plane(real, array, description)) \
    HOOK(CUDA, cuArray3DCreate, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *description), \
         create_space_v1(real, array, description)) \
    HOOK(CUDA, cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description), \
         create_space(real, array, description)) \
    HOOK(CUDA, cuArrayDestroy, (CUarray array), destroy_array(real, array)) \
    HOOK(CUDA, cuMipmappedArrayCreate, \
         (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned int levels), \
         create_mipmapped(real, array, description, levels)) \
    HOOK(CUDA, cuMipmappedArrayDestroy, (CUmipmappedArray array), destroy_mipmapped(real, array))

/* ---- graphs.c --------------------------------------------------------------------------------------- */

#define FGPU_GRAPH_HOOKS(HOOK) \
    HOOK(CUDA, cuGraphAddMemAllocNode, \
         (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, \
          CUDA_MEM_ALLOC_NODE_PARAMS *parameters), \
         add_allocation(real, node, graph, after, count, parameters)) \
    HOOK(CUDA, cuGraphAddNode, \
         (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeParams *parameters), \
         add_node(real, node, graph, after, count, parameters)) \
    HOOK(CUDA, cuGraphAddNode_v2, \
         (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, \
          CUgraphNodeParams *parameters), \
         add_node_v2(real, node, graph, after, edges, count, parameters)) \
    HOOK(CUDA, cuGraphAddNode_v3, \
         (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, \
          CUgraphNodeParams *parameters), \
         add_node_v2(real, node, graph, after, edges, count, parameters)) \
    HOOK(CUDA, cuGraphInstantiate, \
         (CUgraphExec *executable, CUgraph graph, CUgraphNode *error, char *text, size_t size), \
         instantiate(real, executable, graph, error, text, size)) \
    HOOK(CUDA, cuGraphInstantiate_v2, \
         (CUgraphExec *executable, CUgraph graph, CUgraphNode *error, char *text, size_t size), \
         instantiate(real, executable, graph, error, text, size)) \
    HOOK(CUDA, cuGraphInstantiateWithFlags, (CUgraphExec *executable, CUgraph graph, unsigned long long flags), \
         instantiate_with_flags(real, executable, graph, flags)) \
    HOOK(CUDA, cuGraphInstantiateWithParams, \
         (CUgraphExec *executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), \
         instantiate_with_params(real, executable, graph, parameters)) \
    HOOK(CUDA, cuGraphInstantiateWithParams_ptsz, \
         (CUgraphExec *executable, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), \
         instantiate_with_params(real, executable, graph, parameters)) \
    HOOK(CUDA, cuGraphUpload, (CUgraphExec executable, CUstream stream), upload(real, executable, stream)) \
    HOOK(CUDA, cuGraphUpload_ptsz, (CUgraphExec executable, CUstream stream), upload(real, executable, stream)) \
    HOOK(CUDA, cuGraphExecDestroy, (CUgraphExec executable), destroy_executable(real, executable)) \
    HOOK(CUDA, cuDeviceGraphMemTrim, (CUdevice device), trim(real, device))

/* ---- contexts.c -------------------------------------------------------------------------------------- */

#define FGPU_CONTEXT_HOOKS(HOOK) \
    HOOK(CUDA, cuCtxCreate, (CUcontext *context, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuCtxCreate_v3, \
         (CUcontext *context, CUexecAffinityParam *affinities, int count, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, affinities, count, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuCtxCreate_v4, \
         (CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, parameters, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuGLCtxCreate, (CUcontext *context, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuGLCtxCreate_v2, (CUcontext *context, unsigned int flags, CUdevice device), \
         may_create(device) ? created(context, device, FGPU_RETRY(real(context, flags, device))) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuVDPAUCtxCreate, \
         (CUcontext *context, unsigned int flags, CUdevice device, uint32_t display, void *lookup), \
         may_create(device) ? created(context, device, real(context, flags, device, display, lookup)) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuVDPAUCtxCreate_v2, \
         (CUcontext *context, unsigned int flags, CUdevice device, uint32_t display, void *lookup), \
         may_create(device) ? created(context, device, real(context, flags, device, display, lookup)) \
                            : CUDA_ERROR_OUT_OF_MEMORY) \
    HOOK(CUDA, cuCtxDestroy, (CUcontext context), destroy(real, context)) \
    HOOK(CUDA, cuCtxDestroy_v2, (CUcontext context), destroy(real, context)) \
    HOOK(CUDA, cuCtxAttach, (CUcontext *context, unsigned int flags), attach(real, context, flags)) \
    HOOK(CUDA, cuCtxDetach, (CUcontext context), detach(real, context)) \
    HOOK(CUDA, cuCtxSetLimit, (CUlimit limit, size_t value), set_limit(real, limit, value)) \
    HOOK(CUDA, cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device), retain(real, context, device)) \
    HOOK(CUDA, cuDevicePrimaryCtxRelease, (CUdevice device), release_primary(real, device)) \
    HOOK(CUDA, cuDevicePrimaryCtxRelease_v2, (CUdevice device), release_primary(real, device)) \
    HOOK(CUDA, cuDevicePrimaryCtxReset, (CUdevice device), release_primary(real, device)) \
    HOOK(CUDA, cuDevicePrimaryCtxReset_v2, (CUdevice device), release_primary(real, device)) \
    HOOK(CUDA, cuGreenCtxCreate, \
         (CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags), \
         create_green(real, context, resources, device, flags)) \
    HOOK(CUDA, cuGreenCtxDestroy, (CUgreenCtx context), destroy_green(real, context))

/* A thread without a context needs no GPU. The runtime may have made this one through no hook. */
#define FGPU_CURRENT_HOOKS(HOOK) \
    HOOK(CUDA, cuCtxSetCurrent, (CUcontext context), \
         context == NULL || fgpu_pass_gate() ? entered(real(context)) : CUDA_ERROR_DEVICE_UNAVAILABLE)

/* ---- report.c ---------------------------------------------------------------------------------------- */

#define FGPU_REPORT_HOOKS(HOOK) \
    HOOK(CUDA, cuMemGetInfo, (unsigned int *unused, unsigned int *total), memory_info_v1(real, unused, total)) \
    HOOK(CUDA, cuMemGetInfo_v2, (size_t *unused, size_t *total), memory_info(real, unused, total))

#define FGPU_TOTAL_HOOKS(HOOK) \
    HOOK(CUDA, cuDeviceTotalMem, (unsigned int *bytes, CUdevice device), total_v1(real, bytes, device)) \
    HOOK(CUDA, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device), total(real, bytes, device))

/* ---- nvml.c ------------------------------------------------------------------------------------------ */

#define FGPU_NVML_HOOKS(HOOK) \
    HOOK(NVML, nvmlDeviceGetCount, (unsigned int *count), count_own(real(count), count)) \
    HOOK(NVML, nvmlDeviceGetCount_v2, (unsigned int *count), count_own(real(count), count)) \
    HOOK(NVML, nvmlDeviceGetHandleByIndex, (unsigned int index, nvmlDevice_t *device), own_at(index, device)) \
    HOOK(NVML, nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device), own_at(index, device)) \
    HOOK(NVML, nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), only_own(real(uuid, device), device)) \
    HOOK(NVML, nvmlDeviceGetHandleByUUIDV, (const nvmlUUID_t *uuid, nvmlDevice_t *device), \
         only_own(real(uuid, device), device)) \
    HOOK(NVML, nvmlDeviceGetHandleBySerial, (const char *serial, nvmlDevice_t *device), \
         only_own(real(serial, device), device)) \
    HOOK(NVML, nvmlDeviceGetHandleByPciBusId, (const char *id, nvmlDevice_t *device), only_own(real(id, device), device)) \
    HOOK(NVML, nvmlDeviceGetHandleByPciBusId_v2, (const char *id, nvmlDevice_t *device), only_own(real(id, device), device)) \
    HOOK(NVML, nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index), index_of(real(device, index), device, index)) \
    HOOK(NVML, nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), memory_info(real, device, memory)) \
    HOOK(NVML, nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory), \
         memory_info_v2(real, device, memory)) \
    FGPU_PROCESS_HOOKS(HOOK, nvmlDeviceGetComputeRunningProcesses, COMPUTE) \
    FGPU_PROCESS_HOOKS(HOOK, nvmlDeviceGetGraphicsRunningProcesses, OTHER) \
    FGPU_PROCESS_HOOKS(HOOK, nvmlDeviceGetMPSComputeRunningProcesses, OTHER) \
    HOOK(NVML, nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_v1_t *list), \
         detail_list(real, device, list)) \
    HOOK(NVML, nvmlDeviceGetProcessUtilization, \
         (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long since), \
         utilization(real, device, samples, count, since)) \
    HOOK(NVML, nvmlDeviceGetProcessesUtilizationInfo, \
         (nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *information), \
         utilization_info(real, device, information)) \
    HOOK(NVML, nvmlDeviceGetAccountingPids, (nvmlDevice_t device, unsigned int *count, unsigned int *pids), \
         accounting_pids(real, device, count, pids)) \
    HOOK(NVML, nvmlDeviceGetAccountingStats, \
         (nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *statistics), \
         fgpu_is_ours(pid) ? real(device, pid, statistics) : NVML_ERROR_NOT_FOUND)

/* The second and the third version differ in what the driver counts, but write the same. */
#define FGPU_PROCESS_HOOKS(HOOK, name, kind) \
    HOOK(NVML, name, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *processes), \
         list_v1(real, device, kind, count, processes)) \
    HOOK(NVML, name##_v2, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes), \
         list_v2(real, device, kind, count, processes)) \
    HOOK(NVML, name##_v3, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *processes), \
         list_v2(real, device, kind, count, processes))

/* ---- launch.c ---------------------------------------------------------------------------------------- */

#define FGPU_LAUNCH_PARAMETERS \
    CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x, \
        unsigned int block_y, unsigned int block_z, unsigned int shared, CUstream stream, void **parameters
#define FGPU_LAUNCH_ARGUMENTS \
    function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters
#define FGPU_CAPTURE_PARAMETERS \
    CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges, size_t count, \
        CUstreamCaptureMode mode
#define FGPU_RECAPTURE_PARAMETERS \
    CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *data

#define FGPU_LAUNCH_HOOKS(HOOK) \
    HOOK(CUDA, cuLaunchKernel, (FGPU_LAUNCH_PARAMETERS, void **extra), \
         launch_kernel(real, false, FGPU_LAUNCH_ARGUMENTS, extra)) \
    HOOK(CUDA, cuLaunchKernel_ptsz, (FGPU_LAUNCH_PARAMETERS, void **extra), \
         launch_kernel(real, true, FGPU_LAUNCH_ARGUMENTS, extra)) \
    HOOK(CUDA, cuLaunchKernelEx, \
         (const CUlaunchConfig *configuration, CUfunction function, void **parameters, void **extra), \
         launch_kernel_ex(real, false, configuration, function, parameters, extra)) \
    HOOK(CUDA, cuLaunchKernelEx_ptsz, \
         (const CUlaunchConfig *configuration, CUfunction function, void **parameters, void **extra), \
         launch_kernel_ex(real, true, configuration, function, parameters, extra)) \
    HOOK(CUDA, cuLaunchCooperativeKernel, (FGPU_LAUNCH_PARAMETERS), \
         launch_cooperative(real, false, FGPU_LAUNCH_ARGUMENTS)) \
    HOOK(CUDA, cuLaunchCooperativeKernel_ptsz, (FGPU_LAUNCH_PARAMETERS), \
         launch_cooperative(real, true, FGPU_LAUNCH_ARGUMENTS)) \
    HOOK(CUDA, cuLaunchCooperativeKernelMultiDevice, \
         (CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags), \
         launch_on_several(real, launches, count, flags)) \
    HOOK(CUDA, cuLaunch, (CUfunction function), launch_legacy(real, function)) \
    HOOK(CUDA, cuLaunchGrid, (CUfunction function, int width, int height), \
         launch_legacy_grid(real, function, width, height)) \
    HOOK(CUDA, cuLaunchGridAsync, (CUfunction function, int width, int height, CUstream stream), \
         launch_legacy_grid_async(real, function, width, height, stream)) \
    HOOK(CUDA, cuGraphLaunch, (CUgraphExec executable, CUstream stream), launch_graph(real, false, executable, stream)) \
    HOOK(CUDA, cuGraphLaunch_ptsz, (CUgraphExec executable, CUstream stream), \
         launch_graph(real, true, executable, stream))

#define FGPU_CAPTURE_HOOKS(HOOK) \
    HOOK(CUDA, cuStreamBeginCapture, (CUstream stream), capture_begins(real(stream))) \
    HOOK(CUDA, cuStreamBeginCapture_ptsz, (CUstream stream), capture_begins(real(stream))) \
    HOOK(CUDA, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), \
         capture_begins(real(stream, mode))) \
    HOOK(CUDA, cuStreamBeginCapture_v2_ptsz, (CUstream stream, CUstreamCaptureMode mode), \
         capture_begins(real(stream, mode))) \
    HOOK(CUDA, cuStreamBeginCaptureToGraph, (FGPU_CAPTURE_PARAMETERS), \
         capture_begins(real(stream, graph, after, edges, count, mode))) \
    HOOK(CUDA, cuStreamBeginCaptureToGraph_ptsz, (FGPU_CAPTURE_PARAMETERS), \
         capture_begins(real(stream, graph, after, edges, count, mode))) \
    HOOK(CUDA, cuStreamBeginRecaptureToGraph, (FGPU_RECAPTURE_PARAMETERS), \
         capture_begins(real(stream, mode, graph, callback, data))) \
    HOOK(CUDA, cuStreamBeginRecaptureToGraph_ptsz, (FGPU_RECAPTURE_PARAMETERS), \
         capture_begins(real(stream, mode, graph, callback, data))) \
    HOOK(CUDA, cuStreamEndCapture, (CUstream stream, CUgraph *graph), \
         capture_ends(real, false, stream, graph)) \
    HOOK(CUDA, cuStreamEndCapture_ptsz, (CUstream stream, CUgraph *graph), \
         capture_ends(real, true, stream, graph)) \
    /* Into work of a graphics library, which is not limited. */ \
    HOOK(CUDA, cuStreamBeginCaptureToCig, (CUstream stream, CUstreamCigCaptureParams *parameters), \
         capture_begins(real(stream, parameters))) \
    HOOK(CUDA, cuStreamBeginCaptureToCig_ptsz, (CUstream stream, CUstreamCigCaptureParams *parameters), \
         capture_begins(real(stream, parameters))) \
    HOOK(CUDA, cuStreamEndCaptureToCig, (CUstream stream), capture_to_cig_ends(real(stream))) \
    HOOK(CUDA, cuStreamEndCaptureToCig_ptsz, (CUstream stream), capture_to_cig_ends(real(stream)))

/* ---- all of them --------------------------------------------------------------------------------------- */

#define FGPU_HOOKS(HOOK) \
    FGPU_LIBC_HOOKS(HOOK) \
    FGPU_LOOKUP_HOOKS(HOOK) \
    FGPU_DEVICE_HOOKS(HOOK) \
    FGPU_MEMORY_HOOKS(HOOK) \
    FGPU_POOL_HOOKS(HOOK) \
    FGPU_VIRTUAL_HOOKS(HOOK) \
    FGPU_ARRAY_HOOKS(HOOK) \
    FGPU_GRAPH_HOOKS(HOOK) \
    FGPU_CONTEXT_HOOKS(HOOK) \
    FGPU_CURRENT_HOOKS(HOOK) \
    FGPU_REPORT_HOOKS(HOOK) \
    FGPU_TOTAL_HOOKS(HOOK) \
    FGPU_NVML_HOOKS(HOOK) \
    FGPU_LAUNCH_HOOKS(HOOK) \
    FGPU_CAPTURE_HOOKS(HOOK)

/* Called, not hooked. */
#define FGPU_CALLS(CALL) \
    CALL(CUDA, cuCtxGetCurrent) \
    CALL(CUDA, cuCtxGetDevice) \
    CALL(CUDA, cuCtxGetLimit) \
    CALL(CUDA, cuCtxFromGreenCtx) \
    CALL(CUDA, cuCtxPushCurrent_v2) \
    CALL(CUDA, cuCtxPopCurrent_v2) \
    CALL(CUDA, cuDeviceGetAttribute) \
    CALL(CUDA, cuDeviceGetUuid) \
    CALL(CUDA, cuDeviceGetUuid_v2) \
    CALL(CUDA, cuDevicePrimaryCtxGetState) \
    CALL(CUDA, cuMemPoolGetAttribute) \
    CALL(CUDA, cuThreadExchangeStreamCaptureMode) \
    CALL(CUDA, cuGraphGetNodes) \
    CALL(CUDA, cuGraphNodeGetType) \
    CALL(CUDA, cuGraphMemAllocNodeGetParams) \
    CALL(CUDA, cuGraphChildGraphNodeGetGraph) \
    CALL(NVML, nvmlDeviceGetUUID) \
    CALL(NVML, nvmlDeviceGetDeviceHandleFromMigDeviceHandle)

enum fgpu_library { FGPU_LIBC, FGPU_CUDA, FGPU_NVML, FGPU_LIBRARIES };

enum {
#define FGPU_NUMBER(library, name, ...) FGPU_REAL_##name,
#define FGPU_GATED_NUMBER(name) FGPU_REAL_##name,
    FGPU_GATED(FGPU_GATED_NUMBER) FGPU_GATED_COUNT, /* first, as parking.c counts them from 0 */
    FGPU_BEFORE_HOOKS = FGPU_GATED_COUNT - 1,
    FGPU_HOOKS(FGPU_NUMBER) FGPU_HOOK_COUNT, /* numbers from here on are of functions that are only called */
    FGPU_BEFORE_CALLS = FGPU_HOOK_COUNT - 1,
    FGPU_CALLS(FGPU_NUMBER) FGPU_REAL_COUNT
};

/* table.c: name and hook of each number; the hook is NULL if the function is only called. */
struct fgpu_hook {
    const char *name;
    void *hook;
    uint8_t library;
};
extern const struct fgpu_hook fgpu_hooks[FGPU_REAL_COUNT];

/* The number of the hook of this name, or -1. */
int fgpu_hook_by_name(const char *name);

/* Whether this object has most of a library's functions in the table: it is that library, whatever its name, or a
 * substitute for it. */
struct fgpu_object;
bool fgpu_implements(const struct fgpu_object *object, enum fgpu_library library);

/* resolve.c: the driver's functions by number, found at their first use. */
extern _Atomic(void *) fgpu_reals[FGPU_REAL_COUNT];
void *fgpu_find_real(unsigned number);

static inline void *fgpu_real(unsigned number) {
    void *real = atomic_load_explicit(&fgpu_reals[number], memory_order_acquire);
    return __builtin_expect(real != NULL, 1) ? real : fgpu_find_real(number);
}

#define DRIVER(name) ((__typeof__(&name))fgpu_real(FGPU_REAL_##name))

/* table.c: makes each part forget the state of the parent process, including locks held by its other threads. */
void fgpu_forget(void);

static inline void fgpu_enter(void) {
    if (__builtin_expect(fgpu_forked(), 0))
        fgpu_forget();
}

/* The result for a program that was linked against a function missing in its driver. */
#define FGPU_MISSING_CUDA CUDA_ERROR_NOT_FOUND
#define FGPU_MISSING_NVML NVML_ERROR_FUNCTION_NOT_FOUND
#define FGPU_RESULT_CUDA CUresult
#define FGPU_RESULT_NVML nvmlReturn_t

#define FGPU_EXPORT_HOOK(library, name, parameters, call) \
    FGPU_EXPORT FGPU_RESULT_##library name parameters { \
        fgpu_enter(); \
        __typeof__(&name) real = DRIVER(name); \
        return __builtin_expect(real == NULL, 0) ? FGPU_MISSING_##library : (call); \
    }

/* A hook that waits while the session is parked. */
#define FGPU_EXPORT_GATED_HOOK(library, name, parameters, call) \
    FGPU_EXPORT CUresult name parameters { \
        fgpu_enter(); \
        __typeof__(&name) real = DRIVER(name); \
        return __builtin_expect(real == NULL, 0) ? FGPU_MISSING_CUDA \
               : fgpu_pass_gate()                ? (call) \
                                                 : CUDA_ERROR_DEVICE_UNAVAILABLE; \
    }

#endif
