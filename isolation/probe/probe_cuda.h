/* The CUDA driver as probe_cuda.c and probe_allocate.c use it. */
#ifndef FGPU_PROBE_CUDA_H
#define FGPU_PROBE_CUDA_H

#include "probe.h"

#include "cuda_abi.h"

struct cuda {
    struct library library;
    int version;
    int count;
};

/* A function of the driver by dlsym, as a pointer of its own type; NULL if missing. */
#define CUDA_FUNCTION(cuda, name) ((__typeof__(&name))library_function(&(cuda)->library, #name))

/* Loads and initialises the driver and appends the section's beginning. Returns false if nothing else can be reported;
 * the object is closed then. */
bool cuda_begin(struct cuda *cuda, struct json *json);

/* The bytes by which the driver knows a device. */
bool cuda_uuid(const struct cuda *cuda, CUdevice device, unsigned char uuid[16]);

/* Appends `"error":` with the call's name and the driver's name of the result; null for success. */
void cuda_error(const struct cuda *cuda, struct json *json, const char *call, int result);

#endif
