/* Libraries that a program loads, by PART: what they look up and open depends on which library calls. */
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stddef.h>

#define API __attribute__((visibility("default")))

#if PART == 1 /* linked against the driver */
API CUresult library_allocates(void) {
    CUdeviceptr address;
    return cuMemAlloc_v2(&address, 1);
}
API void *library_address(void) {
    return (void *)cuMemAlloc_v2;
}
#elif PART == 2 /* opens one that only its own DT_RUNPATH leads to */
API void *library_opens(const char *name) {
    void *volatile found = dlopen(name, RTLD_NOW); /* opens one that only its own DT_RUNPATH finds */
    return found;
}
API void *library_opens_apart(const char *name) {
    void *volatile found = dlmopen(LM_ID_NEWLM, name, RTLD_NOW);
    return found;
}
#elif PART == 3 /* opened by PART 2 */
API int library_found(void) {
    return 3;
}
#elif PART == 4 /* preloaded beside libfgpu: wraps a function of libc and one of the driver */
API long a64l(const char *text) {
    long (*next)(const char *) = (long (*)(const char *))dlsym(RTLD_NEXT, "a64l");
    return next(text) + 1000;
}
API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    __typeof__(&cuMemAlloc_v2) next = (__typeof__(&cuMemAlloc_v2))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    CUresult result = next == NULL ? CUDA_ERROR_NOT_FOUND : next(address, bytes);
    return (CUresult)(result + 10000);
}
API void *preloaded_next(void) {
    void *volatile found = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    return found;
}
#endif
