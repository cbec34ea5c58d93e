/* The functions that only pass the gate of parking.c, by their exported names: they need the GPU, take no memory that is
 * charged, and start no work that is timed. Each becomes a few instructions that load the gate and jump on, whatever the
 * function's parameters are. Their newer versions are not refused, and do not wait.
 *
 * Neither here nor hooked, as they need no GPU and have to answer at once: what asks for devices, versions, errors and
 * the thread's context, and what only reads or describes (functions, graphs, tensors). */
#ifndef FGPU_GATED_H
#define FGPU_GATED_H

#define FGPU_GATED(GATED) \
    /* copies and fills */ \
    GATED(cuMemcpy) GATED(cuMemcpy2D) GATED(cuMemcpy2DAsync) GATED(cuMemcpy2DAsync_v2) \
    GATED(cuMemcpy2DAsync_v2_ptsz) GATED(cuMemcpy2DUnaligned) GATED(cuMemcpy2DUnaligned_v2) \
    GATED(cuMemcpy2DUnaligned_v2_ptds) GATED(cuMemcpy2D_v2) GATED(cuMemcpy2D_v2_ptds) GATED(cuMemcpy3D) \
    GATED(cuMemcpy3DAsync) GATED(cuMemcpy3DAsync_v2) GATED(cuMemcpy3DAsync_v2_ptsz) GATED(cuMemcpy3DBatchAsync) \
    GATED(cuMemcpy3DBatchAsync_ptsz) GATED(cuMemcpy3DBatchAsync_v2) GATED(cuMemcpy3DBatchAsync_v2_ptsz) \
    GATED(cuMemcpy3DPeer) GATED(cuMemcpy3DPeerAsync) GATED(cuMemcpy3DPeerAsync_ptsz) GATED(cuMemcpy3DPeer_ptds) \
    GATED(cuMemcpy3DWithAttributesAsync) GATED(cuMemcpy3DWithAttributesAsync_ptsz) GATED(cuMemcpy3D_v2) \
    GATED(cuMemcpy3D_v2_ptds) GATED(cuMemcpyAsync) GATED(cuMemcpyAsync_ptsz) GATED(cuMemcpyAtoA) \
    GATED(cuMemcpyAtoA_v2) GATED(cuMemcpyAtoA_v2_ptds) GATED(cuMemcpyAtoD) GATED(cuMemcpyAtoD_v2) \
    GATED(cuMemcpyAtoD_v2_ptds) GATED(cuMemcpyAtoH) GATED(cuMemcpyAtoHAsync) GATED(cuMemcpyAtoHAsync_v2) \
    GATED(cuMemcpyAtoHAsync_v2_ptsz) GATED(cuMemcpyAtoH_v2) GATED(cuMemcpyAtoH_v2_ptds) GATED(cuMemcpyBatchAsync) \
    GATED(cuMemcpyBatchAsync_ptsz) GATED(cuMemcpyBatchAsync_v2) GATED(cuMemcpyBatchAsync_v2_ptsz) \
    GATED(cuMemcpyDtoA) GATED(cuMemcpyDtoA_v2) GATED(cuMemcpyDtoA_v2_ptds) GATED(cuMemcpyDtoD) \
    GATED(cuMemcpyDtoDAsync) GATED(cuMemcpyDtoDAsync_v2) GATED(cuMemcpyDtoDAsync_v2_ptsz) GATED(cuMemcpyDtoD_v2) \
    GATED(cuMemcpyDtoD_v2_ptds) GATED(cuMemcpyDtoH) GATED(cuMemcpyDtoHAsync) GATED(cuMemcpyDtoHAsync_v2) \
    GATED(cuMemcpyDtoHAsync_v2_ptsz) GATED(cuMemcpyDtoH_v2) GATED(cuMemcpyDtoH_v2_ptds) GATED(cuMemcpyHtoA) \
    GATED(cuMemcpyHtoAAsync) GATED(cuMemcpyHtoAAsync_v2) GATED(cuMemcpyHtoAAsync_v2_ptsz) GATED(cuMemcpyHtoA_v2) \
    GATED(cuMemcpyHtoA_v2_ptds) GATED(cuMemcpyHtoD) GATED(cuMemcpyHtoDAsync) GATED(cuMemcpyHtoDAsync_v2) \
    GATED(cuMemcpyHtoDAsync_v2_ptsz) GATED(cuMemcpyHtoD_v2) GATED(cuMemcpyHtoD_v2_ptds) GATED(cuMemcpyPeer) \
    GATED(cuMemcpyPeerAsync) GATED(cuMemcpyPeerAsync_ptsz) GATED(cuMemcpyPeer_ptds) \
    GATED(cuMemcpyWithAttributesAsync) GATED(cuMemcpyWithAttributesAsync_ptsz) GATED(cuMemcpy_ptds) \
    GATED(cuMemsetD16) GATED(cuMemsetD16Async) GATED(cuMemsetD16Async_ptsz) GATED(cuMemsetD16_v2) \
    GATED(cuMemsetD16_v2_ptds) GATED(cuMemsetD2D16) GATED(cuMemsetD2D16Async) GATED(cuMemsetD2D16Async_ptsz) \
    GATED(cuMemsetD2D16_v2) GATED(cuMemsetD2D16_v2_ptds) GATED(cuMemsetD2D32) GATED(cuMemsetD2D32Async) \
    GATED(cuMemsetD2D32Async_ptsz) GATED(cuMemsetD2D32_v2) GATED(cuMemsetD2D32_v2_ptds) GATED(cuMemsetD2D8) \
    GATED(cuMemsetD2D8Async) GATED(cuMemsetD2D8Async_ptsz) GATED(cuMemsetD2D8_v2) GATED(cuMemsetD2D8_v2_ptds) \
    GATED(cuMemsetD32) GATED(cuMemsetD32Async) GATED(cuMemsetD32Async_ptsz) GATED(cuMemsetD32_v2) \
    GATED(cuMemsetD32_v2_ptds) GATED(cuMemsetD8) GATED(cuMemsetD8Async) GATED(cuMemsetD8Async_ptsz) \
    GATED(cuMemsetD8_v2) GATED(cuMemsetD8_v2_ptds) \
    /* other memory */ \
    GATED(cuDeviceGetDefaultMemPool) GATED(cuDeviceGetGraphMemAttribute) GATED(cuDeviceGetMemPool) \
    GATED(cuDeviceSetGraphMemAttribute) GATED(cuDeviceSetMemPool) GATED(cuIpcCloseMemHandle) \
    GATED(cuIpcGetEventHandle) GATED(cuIpcGetMemHandle) GATED(cuIpcOpenEventHandle) GATED(cuIpcOpenMemHandle) \
    GATED(cuIpcOpenMemHandle_v2) GATED(cuMemAddressFree) GATED(cuMemAddressReserve) GATED(cuMemAdvise) \
    GATED(cuMemAdvise_v2) GATED(cuMemAllocHost) GATED(cuMemAllocHost_v2) GATED(cuMemBatchDecompressAsync) \
    GATED(cuMemBatchDecompressAsync_ptsz) GATED(cuMemDiscardAndPrefetchBatchAsync) \
    GATED(cuMemDiscardAndPrefetchBatchAsync_ptsz) GATED(cuMemDiscardBatchAsync) GATED(cuMemDiscardBatchAsync_ptsz) \
    GATED(cuMemFreeHost) GATED(cuMemGetAddressRange) GATED(cuMemGetAddressRange_v2) GATED(cuMemHostAlloc) \
    GATED(cuMemHostGetDevicePointer) GATED(cuMemHostGetDevicePointer_v2) GATED(cuMemHostGetFlags) \
    GATED(cuMemHostRegister) GATED(cuMemHostRegister_v2) GATED(cuMemHostUnregister) \
    GATED(cuMemImportFromShareableHandle) GATED(cuMemPoolSetAccess) GATED(cuMemPoolSetAttribute) \
    GATED(cuMemPrefetchAsync) GATED(cuMemPrefetchAsync_ptsz) GATED(cuMemPrefetchAsync_v2) \
    GATED(cuMemPrefetchAsync_v2_ptsz) GATED(cuMemPrefetchBatchAsync) GATED(cuMemPrefetchBatchAsync_ptsz) \
    GATED(cuMemSetAccess) GATED(cuMemSetMemPool) GATED(cuPointerGetAttribute) GATED(cuPointerGetAttributes) \
    GATED(cuPointerSetAttribute) \
    /* streams and events */ \
    GATED(cuCtxRecordEvent) GATED(cuCtxResetPersistingL2Cache) GATED(cuCtxWaitEvent) GATED(cuEventCreate) \
    GATED(cuEventDestroy) GATED(cuEventDestroy_v2) GATED(cuEventElapsedTime) GATED(cuEventElapsedTime_v2) \
    GATED(cuEventQuery) GATED(cuEventRecord) GATED(cuEventRecordWithFlags) GATED(cuEventRecordWithFlags_ptsz) \
    GATED(cuEventRecord_ptsz) GATED(cuLaunchHostFunc) GATED(cuLaunchHostFunc_ptsz) GATED(cuLaunchHostFunc_v2) \
    GATED(cuLaunchHostFunc_v2_ptsz) GATED(cuSignalExternalSemaphoresAsync) \
    GATED(cuSignalExternalSemaphoresAsync_ptsz) GATED(cuStreamAddCallback) GATED(cuStreamAddCallback_ptsz) \
    GATED(cuStreamAttachMemAsync) GATED(cuStreamAttachMemAsync_ptsz) GATED(cuStreamBatchMemOp) \
    GATED(cuStreamBatchMemOp_ptsz) GATED(cuStreamBatchMemOp_v2) GATED(cuStreamBatchMemOp_v2_ptsz) \
    GATED(cuStreamCopyAttributes) GATED(cuStreamCopyAttributes_ptsz) GATED(cuStreamCreate) \
    GATED(cuStreamCreateWithPriority) GATED(cuStreamDestroy) GATED(cuStreamDestroy_v2) GATED(cuStreamGetAttribute) \
    GATED(cuStreamGetAttribute_ptsz) GATED(cuStreamGetCaptureInfo) GATED(cuStreamGetCaptureInfo_ptsz) \
    GATED(cuStreamGetCaptureInfo_v2) GATED(cuStreamGetCaptureInfo_v2_ptsz) GATED(cuStreamGetCaptureInfo_v3) \
    GATED(cuStreamGetCaptureInfo_v3_ptsz) GATED(cuStreamGetCtx) GATED(cuStreamGetCtx_ptsz) GATED(cuStreamGetCtx_v2) \
    GATED(cuStreamGetCtx_v2_ptsz) GATED(cuStreamGetDevResource) GATED(cuStreamGetDevResource_ptsz) \
    GATED(cuStreamGetDevice) GATED(cuStreamGetDevice_ptsz) GATED(cuStreamGetFlags) GATED(cuStreamGetFlags_ptsz) \
    GATED(cuStreamGetGreenCtx) GATED(cuStreamGetId) GATED(cuStreamGetId_ptsz) GATED(cuStreamGetPriority) \
    GATED(cuStreamGetPriority_ptsz) GATED(cuStreamIsCapturing) GATED(cuStreamIsCapturing_ptsz) GATED(cuStreamQuery) \
    GATED(cuStreamQuery_ptsz) GATED(cuStreamSetAttribute) GATED(cuStreamSetAttribute_ptsz) \
    GATED(cuStreamUpdateCaptureDependencies) GATED(cuStreamUpdateCaptureDependencies_ptsz) \
    GATED(cuStreamUpdateCaptureDependencies_v2) GATED(cuStreamUpdateCaptureDependencies_v2_ptsz) \
    GATED(cuStreamWaitEvent) GATED(cuStreamWaitEvent_ptsz) GATED(cuStreamWaitValue32) \
    GATED(cuStreamWaitValue32_ptsz) GATED(cuStreamWaitValue32_v2) GATED(cuStreamWaitValue32_v2_ptsz) \
    GATED(cuStreamWaitValue64) GATED(cuStreamWaitValue64_ptsz) GATED(cuStreamWaitValue64_v2) \
    GATED(cuStreamWaitValue64_v2_ptsz) GATED(cuStreamWriteValue32) GATED(cuStreamWriteValue32_ptsz) \
    GATED(cuStreamWriteValue32_v2) GATED(cuStreamWriteValue32_v2_ptsz) GATED(cuStreamWriteValue64) \
    GATED(cuStreamWriteValue64_ptsz) GATED(cuStreamWriteValue64_v2) GATED(cuStreamWriteValue64_v2_ptsz) \
    GATED(cuWaitExternalSemaphoresAsync) GATED(cuWaitExternalSemaphoresAsync_ptsz) \
    /* code */ \
    GATED(cuFuncGetAttribute) GATED(cuFuncLoad) GATED(cuFuncSetAttribute) GATED(cuFuncSetCacheConfig) \
    GATED(cuKernelGetAttribute) GATED(cuKernelGetFunction) GATED(cuKernelSetAttribute) \
    GATED(cuKernelSetCacheConfig) GATED(cuLibraryGetGlobal) GATED(cuLibraryGetKernel) GATED(cuLibraryGetManaged) \
    GATED(cuLibraryGetModule) GATED(cuLibraryLoadData) GATED(cuLibraryLoadFromFile) GATED(cuLibraryUnload) \
    GATED(cuModuleGetFunction) GATED(cuModuleGetGlobal) GATED(cuModuleGetGlobal_v2) GATED(cuModuleLoad) \
    GATED(cuModuleLoadData) GATED(cuModuleLoadDataEx) GATED(cuModuleLoadFatBinary) GATED(cuModuleUnload) \
    /* graphs and others */ \
    GATED(cuGraphAddBatchMemOpNode) GATED(cuGraphAddChildGraphNode) GATED(cuGraphAddDependencies) \
    GATED(cuGraphAddDependencies_v2) GATED(cuGraphAddEmptyNode) GATED(cuGraphAddEventRecordNode) \
    GATED(cuGraphAddEventWaitNode) GATED(cuGraphAddExternalSemaphoresSignalNode) \
    GATED(cuGraphAddExternalSemaphoresWaitNode) GATED(cuGraphAddHostNode) GATED(cuGraphAddKernelNode) \
    GATED(cuGraphAddKernelNode_v2) GATED(cuGraphAddMemFreeNode) GATED(cuGraphAddMemcpyNode) \
    GATED(cuGraphAddMemsetNode) GATED(cuGraphClone) GATED(cuGraphCreate) GATED(cuGraphDestroy) \
    GATED(cuGraphDestroyNode) GATED(cuGraphExecBatchMemOpNodeSetParams) GATED(cuGraphExecChildGraphNodeSetParams) \
    GATED(cuGraphExecEventRecordNodeSetEvent) GATED(cuGraphExecEventWaitNodeSetEvent) \
    GATED(cuGraphExecExternalSemaphoresSignalNodeSetParams) GATED(cuGraphExecExternalSemaphoresWaitNodeSetParams) \
    GATED(cuGraphExecGetFlags) GATED(cuGraphExecGetId) GATED(cuGraphExecHostNodeSetParams) \
    GATED(cuGraphExecKernelNodeSetParams) GATED(cuGraphExecKernelNodeSetParams_v2) \
    GATED(cuGraphExecMemcpyNodeSetParams) GATED(cuGraphExecMemsetNodeSetParams) GATED(cuGraphExecNodeSetParams) \
    GATED(cuGraphExecUpdate) GATED(cuGraphExecUpdate_v2) GATED(cuSurfObjectCreate) GATED(cuSurfObjectDestroy) \
    GATED(cuTexObjectCreate) GATED(cuTexObjectDestroy)

#endif
