/* Arrays. Their size follows from their description; the driver's padding is unknown and not charged. */
#include "parts.h"

/* ---- Sizes ---- */

/* For each format that is not a fixed number of bytes per channel: the side of its block in elements, and the block's
 * bytes. */
static const struct {
    CUarray_format format;
    uint8_t side, bytes;
} blocks[] = {
    {CU_AD_FORMAT_UNORM_INT_101010_2, 1, 4},
    {CU_AD_FORMAT_UNORM_INT8X1, 1, 1},
    {CU_AD_FORMAT_UNORM_INT8X2, 1, 2},
    {CU_AD_FORMAT_UNORM_INT8X4, 1, 4},
    {CU_AD_FORMAT_UNORM_INT16X1, 1, 2},
    {CU_AD_FORMAT_UNORM_INT16X2, 1, 4},
    {CU_AD_FORMAT_UNORM_INT16X4, 1, 8},
    {CU_AD_FORMAT_SNORM_INT8X1, 1, 1},
    {CU_AD_FORMAT_SNORM_INT8X2, 1, 2},
    {CU_AD_FORMAT_SNORM_INT8X4, 1, 4},
    {CU_AD_FORMAT_SNORM_INT16X1, 1, 2},
    {CU_AD_FORMAT_SNORM_INT16X2, 1, 4},
    {CU_AD_FORMAT_SNORM_INT16X4, 1, 8},
    {CU_AD_FORMAT_BC1_UNORM, 4, 8},
    {CU_AD_FORMAT_BC1_UNORM_SRGB, 4, 8},
    {CU_AD_FORMAT_BC2_UNORM, 4, 16},
    {CU_AD_FORMAT_BC2_UNORM_SRGB, 4, 16},
    {CU_AD_FORMAT_BC3_UNORM, 4, 16},
    {CU_AD_FORMAT_BC3_UNORM_SRGB, 4, 16},
    {CU_AD_FORMAT_BC4_UNORM, 4, 8},
    {CU_AD_FORMAT_BC4_SNORM, 4, 8},
    {CU_AD_FORMAT_BC5_UNORM, 4, 16},
    {CU_AD_FORMAT_BC5_SNORM, 4, 16},
    {CU_AD_FORMAT_BC6H_UF16, 4, 16},
    {CU_AD_FORMAT_BC6H_SF16, 4, 16},
    {CU_AD_FORMAT_BC7_UNORM, 4, 16},
    {CU_AD_FORMAT_BC7_UNORM_SRGB, 4, 16},
    {CU_AD_FORMAT_NV12, 2, 6}, /* brightness for each element, colour for every four */
    {CU_AD_FORMAT_P010, 2, 12},
    {CU_AD_FORMAT_P016, 2, 12},
    {CU_AD_FORMAT_NV16, 2, 8}, /* colour for every two */
    {CU_AD_FORMAT_P210, 2, 16},
    {CU_AD_FORMAT_P216, 2, 16},
    {CU_AD_FORMAT_YUY2, 2, 8},
    {CU_AD_FORMAT_Y210, 2, 16},
    {CU_AD_FORMAT_Y216, 2, 16},
    {CU_AD_FORMAT_AYUV, 1, 4},
    {CU_AD_FORMAT_Y410, 1, 4},
    {CU_AD_FORMAT_Y416, 1, 8},
    {CU_AD_FORMAT_Y444_PLANAR8, 1, 3},
    {CU_AD_FORMAT_Y444_PLANAR10, 1, 6},
    {CU_AD_FORMAT_YUV444_8bit_SemiPlanar, 1, 3},
    {CU_AD_FORMAT_YUV444_16bit_SemiPlanar, 1, 6},
};

static void block_of(CUarray_format format, unsigned int channels, uint64_t *side, uint64_t *bytes) {
    *side = 1;
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8: *bytes = channels; return;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF: *bytes = UINT64_C(2) * channels; return;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT: *bytes = UINT64_C(4) * channels; return;
    default: break;
    }
    *bytes = 16; /* no format needs more for an element; newer ones count as the largest */
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        if (blocks[i].format == format) {
            *side = blocks[i].side;
            *bytes = blocks[i].bytes;
        }
    }
}

static uint64_t at_least_one(uint64_t extent) {
    return extent == 0 ? 1 : extent;
}

static uint64_t blocks_along(uint64_t extent, uint64_t side) {
    extent = at_least_one(extent);
    return extent / side + (extent % side != 0);
}

/* With all levels, each half as long along each side as the one before. Layers and faces stay. */
static uint64_t size_of(const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned int levels) {
    uint64_t width = description->Width, height = description->Height, depth = description->Depth, sum = 0;
    uint64_t side, bytes;
    bool layers = (description->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    if (description->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* the program creates and maps the memory for it: virtual.c */
    block_of(description->Format, description->NumChannels, &side, &bytes);
    for (unsigned int level = 0; level < levels && level < 64; level++) {
        uint64_t plane = fgpu_product(blocks_along(width, side), blocks_along(height, side));
        uint64_t size = fgpu_product(fgpu_product(plane, at_least_one(depth)), bytes);
        sum = size > UINT64_MAX - sum ? UINT64_MAX : sum + size;
        width /= 2;
        height /= 2;
        depth = layers ? depth : depth / 2;
    }
    return sum;
}

/* ---- Arrays ---- */

/* A handle in the table of addresses: no address has the highest bit. */
static CUdeviceptr key_of(const void *array) {
    return (CUdeviceptr)(uintptr_t)array | UINT64_C(1) << 63;
}

static CUresult end(const struct fgpu_holding *claim, const CUarray *array, CUresult result) {
    if (fgpu_end_claim(claim, result == CUDA_SUCCESS ? key_of(*array) : 0, &result))
        DRIVER(cuArrayDestroy)(*array);
    return result;
}

static CUresult create_space(__typeof__(&cuArray3DCreate_v2) real, CUarray *array,
                             const CUDA_ARRAY3D_DESCRIPTOR *description) {
    struct fgpu_holding claim;
    return fgpu_begin_claim(&claim, description == NULL ? 0 : size_of(description, 1))
               ? end(&claim, array, FGPU_RETRY(real(array, description)))
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create_space_v1(__typeof__(&cuArray3DCreate) real, CUarray *array,
                                const CUDA_ARRAY3D_DESCRIPTOR_v1 *narrow) {
    struct fgpu_holding claim;
    CUDA_ARRAY3D_DESCRIPTOR wide = {0};
    if (narrow != NULL)
        wide = (CUDA_ARRAY3D_DESCRIPTOR){narrow->Width,  narrow->Height,      narrow->Depth,
                                         narrow->Format, narrow->NumChannels, narrow->Flags};
    return fgpu_begin_claim(&claim, narrow == NULL ? 0 : size_of(&wide, 1))
               ? end(&claim, array, FGPU_RETRY(real(array, narrow)))
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create_plane(__typeof__(&cuArrayCreate_v2) real, CUarray *array,
                             const CUDA_ARRAY_DESCRIPTOR *description) {
    struct fgpu_holding claim;
    CUDA_ARRAY3D_DESCRIPTOR whole = {0};
    if (description != NULL)
        whole = (CUDA_ARRAY3D_DESCRIPTOR){.Width = description->Width,
                                          .Height = description->Height,
                                          .Format = description->Format,
                                          .NumChannels = description->NumChannels};
    return fgpu_begin_claim(&claim, description == NULL ? 0 : size_of(&whole, 1))
               ? end(&claim, array, FGPU_RETRY(real(array, description)))
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create_plane_v1(__typeof__(&cuArrayCreate) real, CUarray *array,
                                const CUDA_ARRAY_DESCRIPTOR_v1 *narrow) {
    struct fgpu_holding claim;
    CUDA_ARRAY3D_DESCRIPTOR whole = {0};
    if (narrow != NULL)
        whole = (CUDA_ARRAY3D_DESCRIPTOR){.Width = narrow->Width,
                                          .Height = narrow->Height,
                                          .Format = narrow->Format,
                                          .NumChannels = narrow->NumChannels};
    return fgpu_begin_claim(&claim, narrow == NULL ? 0 : size_of(&whole, 1))
               ? end(&claim, array, FGPU_RETRY(real(array, narrow)))
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create_mipmapped(__typeof__(&cuMipmappedArrayCreate) real, CUmipmappedArray *array,
                                 const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned int levels) {
    struct fgpu_holding claim;
    if (!fgpu_begin_claim(&claim, description == NULL ? 0 : size_of(description, levels)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = FGPU_RETRY(real(array, description, levels));
    if (fgpu_end_claim(&claim, result == CUDA_SUCCESS ? key_of(*array) : 0, &result))
        DRIVER(cuMipmappedArrayDestroy)(*array);
    return result;
}

static CUresult destroyed(const struct fgpu_holding *holding, const void *array, CUresult result) {
    if (result == CUDA_SUCCESS)
        fgpu_array_unmapped(array);
    return fgpu_free_ends(holding, result);
}

static CUresult destroy_array(__typeof__(&cuArrayDestroy) real, CUarray array) {
    struct fgpu_holding holding;
    fgpu_free_begins(key_of(array), &holding);
    return destroyed(&holding, array, real(array));
}

static CUresult destroy_mipmapped(__typeof__(&cuMipmappedArrayDestroy) real, CUmipmappedArray array) {
    struct fgpu_holding holding;
    fgpu_free_begins(key_of(array), &holding);
    return destroyed(&holding, array, real(array));
}

FGPU_ARRAY_HOOKS(FGPU_EXPORT_GATED_HOOK)
