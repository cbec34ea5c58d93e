/**
 * Which errors of a cell say that the GPU's memory ran out, in the frameworks' own words. Pure.
 */

/** An error as a kernel tells it. */
export interface IKernelError {
  ename: string;
  evalue: string;
}

const BYTES: Record<string, number> = {
  bytes: 1,
  B: 1,
  KiB: 2 ** 10,
  MiB: 2 ** 20,
  GiB: 2 ** 30,
  TiB: 2 ** 40
};
const ELEMENT_BYTES: Record<string, number> = {
  half: 2,
  bfloat16: 2,
  float: 4,
  double: 8,
  int32: 4,
  int64: 8,
  complex64: 8,
  complex128: 16
};

/** Return whether this is a CUDA out-of-memory error, and not one of the machine's own memory. */
export function isOutOfMemory({ ename, evalue }: IKernelError): boolean {
  if (/CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation/.test(evalue)) {
    return true;
  }
  switch (ename.replace(/^.*\./, '')) {
    case 'OutOfMemoryError': // PyTorch 1.13 and later, and CuPy
      return !/DefaultCPUAllocator/.test(evalue);
    case 'ResourceExhaustedError': // TensorFlow, which has it for the CPU too
      return isOnGpu(evalue);
    case 'XlaRuntimeError':
    case 'JaxRuntimeError':
    case 'InternalError':
    case 'RuntimeError':
    case 'AcceleratorError': // PyTorch 2.8 and later, for what the driver itself says
    case 'CudaAPIError':
    case 'MemoryError': // PyCUDA
      return (
        /RESOURCE_EXHAUSTED.*(out of memory|allocat)/is.test(evalue) ||
        /CUDA (error: )?out of memory|\bcu\w+ failed: out of memory/i.test(evalue) ||
        // TensorFlow: no room for its context, as beside another process that took the whole slice, or for a copy.
        /\bGPU:\d+ failed\. Status: out of memory/.test(evalue) ||
        /\bDst tensor is not initialized\b/.test(evalue) ||
        // XLA, for what a program holds from its beginning.
        /\bINTERNAL: Failed to allocate \d+ bytes\b/.test(evalue) ||
        // What a library gets no memory for, as PyTorch says it.
        /\bCU(BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED\b/.test(evalue)
      );
    default:
      return false;
  }
}

/** Return whether TensorFlow ran out on a GPU: where it says the allocator that failed, this tells, else any GPU. */
function isOnGpu(evalue: string): boolean {
  const failed = /device:(CPU|GPU):\d+ by allocator (\w+)/i.exec(evalue);
  if (failed !== null) {
    return /^gpu$/i.test(failed[1]!) && !/host|^cpu/i.test(failed[2]!);
  }
  return /device:GPU/i.test(evalue) || !/device:CPU|allocator cpu/i.test(evalue);
}

/** Return how much the program asked for when it failed, in MiB rounded up, or null where it does not say. */
export function triedMib({ evalue }: IKernelError): number | null {
  const said =
    /(?:tried to allocate|trying to allocate|out of memory allocating|failed to allocate)\s+([\d.,]+)\s*(bytes|[KMGT]iB|B)\b/i.exec(
      evalue
    );
  if (said !== null) {
    const unit = Object.keys(BYTES).find(
      name => name.toLowerCase() === said[2]!.toLowerCase()
    );
    return mib(Number(said[1]!.replace(/,/g, '')) * BYTES[unit ?? 'bytes']!);
  }
  const tensor = /shape\[([\d,]+)\] and type (\w+)/.exec(evalue);
  const bytes = ELEMENT_BYTES[tensor?.[2] ?? ''];
  if (tensor !== null && bytes !== undefined) {
    const count = tensor[1]!.split(',').reduce((all, n) => all * Number(n), 1);
    return mib(count * bytes);
  }
  return null;
}

function mib(bytes: number): number | null {
  const found = Math.ceil(bytes / 2 ** 20);
  return Number.isFinite(found) && found > 0 && found < 1e9 ? found : null;
}
