/* Compiles only if cuda_abi.h agrees with NVIDIA's cuda.h: every function is declared a second time with the types of
 * the first. cuda.h gives a _ptsz function its plain name while the per-thread mode is on, and declares the plain ones
 * and the old versions at its end under __CUDA_API_VERSION_INTERNAL. Values and layouts are compared by
 * tests/isolation/test_hooks_abi.py. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "cuda_abi.h"
