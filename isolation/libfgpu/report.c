/* What the CUDA driver reports of its memory. A session sees its limit as the total; while the limits cannot be read,
 * it gets an error rather than the device's size. */
#include "parts.h"

/* Replaces the device's numbers by the slice's. */
static CUresult slice_of(int device, uint64_t *unused, uint64_t *total) {
    if (device < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fgpu_see_primary(device);
    fgpu_settle(device);
    uint64_t limit = fgpu_limit_of(device), used = fgpu_used(device), left = limit > used ? limit - used : 0;
    /* The device may be fuller than the shares say; memory that the driver lacks is not available. */
    if (left < *unused)
        *unused = left;
    *total = limit;
    return CUDA_SUCCESS;
}

static CUresult memory_info(__typeof__(&cuMemGetInfo_v2) real, size_t *unused, size_t *total) {
    CUresult result = real(unused, total);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t of_slice[2] = {*unused, *total};
    result = slice_of(fgpu_current_device(), &of_slice[0], &of_slice[1]);
    *unused = result == CUDA_SUCCESS ? of_slice[0] : 0;
    *total = result == CUDA_SUCCESS ? of_slice[1] : 0;
    return result;
}

static unsigned int narrow(uint64_t bytes) {
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

/* The first version's numbers end at 4 GiB; below that they are exact. */
static CUresult memory_info_v1(__typeof__(&cuMemGetInfo) real, unsigned int *unused, unsigned int *total) {
    CUresult result = real(unused, total);
    if (result != CUDA_SUCCESS)
        return result;
    size_t wide_unused, wide_total;
    if (DRIVER(cuMemGetInfo_v2) == NULL)
        return CUDA_ERROR_NOT_FOUND;
    result = memory_info(DRIVER(cuMemGetInfo_v2), &wide_unused, &wide_total);
    *unused = result == CUDA_SUCCESS ? narrow(wide_unused) : 0;
    *total = result == CUDA_SUCCESS ? narrow(wide_total) : 0;
    return result;
}

static CUresult total_of(CUdevice ordinal, uint64_t *total) {
    int device = fgpu_device_of(ordinal);
    *total = device < 0 ? 0 : fgpu_limit_of(device);
    return device < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult total(__typeof__(&cuDeviceTotalMem_v2) real, size_t *bytes, CUdevice device) {
    uint64_t of_slice;
    CUresult result = real(bytes, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = total_of(device, &of_slice);
    *bytes = of_slice;
    return result;
}

static CUresult total_v1(__typeof__(&cuDeviceTotalMem) real, unsigned int *bytes, CUdevice device) {
    uint64_t of_slice;
    CUresult result = real(bytes, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = total_of(device, &of_slice);
    *bytes = narrow(of_slice);
    return result;
}

FGPU_REPORT_HOOKS(FGPU_EXPORT_GATED_HOOK)
FGPU_TOTAL_HOOKS(FGPU_EXPORT_HOOK)
