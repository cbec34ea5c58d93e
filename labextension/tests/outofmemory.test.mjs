// The frameworks' own words when a GPU's memory runs out, and what only looks like them.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { isOutOfMemory, triedMib } from '../lib/outofmemory.js';

const said = [
  ['OutOfMemoryError', 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 2.00 GiB of which 1.2 GiB is free.', 2048],
  ['RuntimeError', 'CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 2.00 GiB total capacity; 1.90 GiB already allocated)', 20],
  ['RuntimeError', 'CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported', null],
  ['AcceleratorError', 'CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation\'', null],
  ['torch.AcceleratorError', 'CUDA error: out of memory', null],
  ['RuntimeError', 'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`', null],
  ['RuntimeError', 'cuDNN error: CUDNN_STATUS_ALLOC_FAILED', null],
  ['ResourceExhaustedError', '{{function_node __wrapped__Fill}} OOM when allocating tensor with shape[1024,1024,300] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Fill]', 1200],
  ['ResourceExhaustedError', "Graph execution error: Detected at node 'Mul' on device:CPU:0 {{function_node __wrapped__Mul_device_/job:localhost/replica:0/task:0/device:GPU:0}} failed to allocate memory [Op:Mul]", null],
  ['ResourceExhaustedError', 'OOM when allocating tensor with shape[1024,1024] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc; copied from /job:localhost/replica:0/task:0/device:CPU:0', 4],
  ['InternalError', 'CUDA runtime implicit initialization on GPU:0 failed. Status: out of memory', null],
  ['InternalError', 'cudaSetDevice() on GPU:0 failed. Status: out of memory', null],
  ['RuntimeError', 'CUDA runtime implicit initialization on GPU:0 failed. Status: out of memory', null],
  ['InternalError', 'Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to /job:localhost/replica:0/task:0/device:GPU:0 in order to run _EagerConst: Dst tensor is not initialized.', null],
  ['XlaRuntimeError', 'INTERNAL: Failed to allocate 400000000 bytes for new constant', 382],
  ['XlaRuntimeError', 'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.', 4096],
  ['JaxRuntimeError', 'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.', 16384],
  ['OutOfMemoryError', 'Out of memory allocating 1,073,741,825 bytes (allocated so far: 512 bytes).', 1025],
  ['CudaAPIError', '[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY', null],
  ['CUDADriverError', '<CUresult.CUDA_ERROR_OUT_OF_MEMORY: 2>', null],
  ['MemoryError', 'cuMemAlloc failed: out of memory', null],
  ['torch.cuda.OutOfMemoryError', 'CUDA out of memory. Tried to allocate 512.00 KiB.', 1]
];

for (const [ename, evalue, mib] of said) {
  test(`${ename}: ${evalue.slice(0, 50)}`, () => {
    assert.equal(isOutOfMemory({ ename, evalue }), true);
    assert.equal(triedMib({ ename, evalue }), mib);
  });
}

const others = [
  ['MemoryError', 'Unable to allocate 74.5 GiB for an array with shape (100000, 100000) and data type float64'],
  ['RuntimeError', '[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can\'t allocate memory'],
  ['ResourceExhaustedError', 'OOM when allocating tensor with shape[9,9] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu'],
  ['ResourceExhaustedError', 'OOM when allocating tensor with shape[9,9] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu; for the copy to /job:localhost/replica:0/task:0/device:GPU:0'],
  ['ResourceExhaustedError', 'OOM when allocating tensor with shape[9,9] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator gpu_host_bfc'],
  ['InternalError', 'cudaSetDevice() on GPU:0 failed. Status: invalid device ordinal'],
  ['ValueError', 'CUDA out of memory is what I print'],
  ['RuntimeError', 'CUDA error: an illegal memory access was encountered'],
  ['AcceleratorError', 'CUDA error: an illegal memory access was encountered'],
  ['RuntimeError', 'CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`'],
  ['XlaRuntimeError', 'INVALID_ARGUMENT: shapes differ']
];

for (const [ename, evalue] of others) {
  test(`not ${ename}: ${evalue.slice(0, 50)}`, () => {
    assert.equal(isOutOfMemory({ ename, evalue }), false);
  });
}
