/*
 * array.c: CUDA arrays. The driver does not report an array's size, so it is computed from the descriptor: rows of
 * 64-byte sectors in blocks of eight rows. A flat array is padded to the next power of two of such blocks, at most 128
 * rows; one with depth is padded to 8 rows and 16 layers (compared with NVML on an H200, driver 580). Formats that are
 * not listed count as 16 bytes per texel, the largest. This size is claimed with a margin; afterwards the actual size
 * is read from NVML.
 */
#include "suspended.h"
#include "charge.h"
#include "device.h"
#include "functions.h"
#include "driver_overhead.h"
#include "tenant.h"

#define SECTOR_BYTES 64u
#define BLOCK_ROWS 8u
#define FLAT_ROWS_MAX 128u
#define DEEP_LAYERS 16u
#define LARGEST_TEXEL_BYTES 16u

static uint64_t times(uint64_t a, uint64_t b)
{
    return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b;
}

static uint64_t texel_bytes(CUarray_format format, unsigned channels)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2u * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4u * channels;
    default:
        return LARGEST_TEXEL_BYTES;
    }
}

static uint64_t block_rows(uint64_t height)
{
    uint64_t rows = BLOCK_ROWS;
    while (rows < height && rows < FLAT_ROWS_MAX)
        rows *= 2;
    return rows;
}

/* Returns the bytes of one level of an array. A height or depth of 0 means a lower dimension. */
static uint64_t level_bytes(uint64_t width, uint64_t height, uint64_t depth, uint64_t texel, bool layered)
{
    uint64_t row = vgpu_round(times(width, texel), SECTOR_BYTES);
    bool deep = depth > 1 && !layered;
    uint64_t rows = vgpu_round(height > 0 ? height : 1, deep ? BLOCK_ROWS : block_rows(height));
    uint64_t layers = deep ? vgpu_round(depth, DEEP_LAYERS) : depth > 0 ? depth : 1;
    return times(times(row, rows), layers);
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    uint64_t texel = texel_bytes(shape->Format, shape->NumChannels);
    uint64_t width = shape->Width;
    uint64_t height = shape->Height;
    uint64_t depth = shape->Depth;
    uint64_t sum = 0;
    bool layered = (shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    if (shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* an array with these flags is address space only: cuMemCreate allocates its memory */
    for (unsigned level = 0; level < levels && width > 0; level++) {
        uint64_t bytes = level_bytes(width, height, depth, texel, layered);
        sum = sum > UINT64_MAX - bytes ? UINT64_MAX : sum + bytes;
        if (width <= 1 && height <= 1 && (layered || depth <= 1))
            break; /* the driver makes no more levels than this */
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        depth = depth > 1 && !layered ? depth / 2 : depth;
    }
    return sum;
}

static CUDA_ARRAY3D_DESCRIPTOR shape_3d(size_t width, size_t height, size_t depth, CUarray_format format,
                                        unsigned channels, unsigned flags)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){
        .Width = width, .Height = height, .Depth = depth, .Format = format, .NumChannels = channels, .Flags = flags};
}

/* Returns the claim for an array of `bytes`. Shapes that are not plain may take somewhat more than computed. */
static uint64_t claim_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels, uint64_t bytes)
{
    uint64_t row = times(shape->Width, texel_bytes(shape->Format, shape->NumChannels));
    bool plain = levels == 1 && shape->Depth <= 1 && row % SECTOR_BYTES == 0 && shape->Height % FLAT_ROWS_MAX == 0;
    if (plain || bytes == 0 || bytes > UINT64_MAX / 2)
        return bytes;
    return bytes + bytes / 4 + 2 * VGPU_PAGE_BYTES;
}

static CUresult destroy(enum vgpu_kind kind, void *handle)
{
    return kind == VGPU_KIND_ARRAY ? CALL(cuArrayDestroy, (CUarray)handle)
                                   : CALL(cuMipmappedArrayDestroy, (CUmipmappedArray)handle);
}

/* Charges the size that NVML reports or, if that is not possible, the computed size. */
static CUresult settle(struct vgpu_charge *charge, CUresult result, enum vgpu_kind kind, uint64_t bytes,
                       void *const *handle)
{
    bool keep;
    struct vgpu_entry entry = {.kind = (uint8_t)kind};
    if (!charge->active || result != CUDA_SUCCESS)
        return vgpu_charge_settle(charge, result, &entry, &keep);
    if (vgpu_overhead_look(charge->device, charge->bytes)) {
        bool fits = vgpu_overhead_within_limit(charge->device); /* the array may have taken more than was claimed */
        if (!fits) {
            destroy(kind, *handle);
            vgpu_overhead_look(charge->device, charge->bytes);
        }
        vgpu_charge_undo(charge, CUDA_SUCCESS);
        return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    entry.key = (uint64_t)(uintptr_t)*handle;
    entry.owner = vgpu_charge_context();
    vgpu_charge_resize(charge, bytes);
    result = vgpu_charge_settle(charge, result, &entry, &keep);
    if (!keep) {
        destroy(kind, *handle);
        vgpu_charge_undo(charge, CUDA_SUCCESS);
    }
    return result;
}

static CUresult destroyed(enum vgpu_kind kind, void *handle)
{
    struct vgpu_entry entry;
    CUdevice device;
    bool limited;
    vgpu_suspended_call();
    bool taken = vgpu_charge_take(kind, (uint64_t)(uintptr_t)handle, &entry);
    CUresult result = destroy(kind, handle);
    vgpu_charge_freed(&entry, taken, result);
    if (!taken && result == CUDA_SUCCESS && vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited &&
        vgpu_device_current(&device) == CUDA_SUCCESS && vgpu_device_index(device) != VGPU_NOT_IN_LEASE)
        vgpu_overhead_look(vgpu_device_index(device), 0);
    return result;
}

/* The descriptor may be NULL; the driver then returns the error. */
#define ARRAY_CREATE(symbol, descriptor, depth, flags)                                                 \
    VGPU_EXPORT CUresult symbol(CUarray *pHandle, const descriptor *pAllocateArray)                    \
    {                                                                                                  \
        struct vgpu_charge charge = {.active = false};                                                 \
        const descriptor *shape = pAllocateArray;                                                      \
        uint64_t bytes = 0;                                                                            \
        vgpu_suspended_call();                                                                         \
        if (shape != NULL) {                                                                           \
            CUDA_ARRAY3D_DESCRIPTOR full = shape_3d(shape->Width, shape->Height, depth, shape->Format, \
                                                    shape->NumChannels, flags);                        \
            bytes = array_bytes(&full, 1);                                                             \
            CUresult refused = vgpu_charge_current(&charge, claim_bytes(&full, 1, bytes));             \
            if (refused != CUDA_SUCCESS)                                                               \
                return refused;                                                                        \
        }                                                                                              \
        CUresult result = CALL(symbol, pHandle, pAllocateArray);                                       \
        return settle(&charge, result, VGPU_KIND_ARRAY, bytes, (void *const *)pHandle);                \
    }

ARRAY_CREATE(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, 0, 0)
ARRAY_CREATE(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, 0, 0)
ARRAY_CREATE(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1, shape->Depth, shape->Flags)
ARRAY_CREATE(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, shape->Depth, shape->Flags)

VGPU_EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *pHandle,
                                            const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
                                            unsigned int numMipmapLevels)
{
    vgpu_suspended_call();
    struct vgpu_charge charge = {.active = false};
    uint64_t bytes = 0;
    if (pMipmappedArrayDesc != NULL) {
        bytes = array_bytes(pMipmappedArrayDesc, numMipmapLevels);
        CUresult refused = vgpu_charge_current(&charge, claim_bytes(pMipmappedArrayDesc, numMipmapLevels, bytes));
        if (refused != CUDA_SUCCESS)
            return refused;
    }
    CUresult result = CALL(cuMipmappedArrayCreate, pHandle, pMipmappedArrayDesc, numMipmapLevels);
    return settle(&charge, result, VGPU_KIND_MIPMAP, bytes, (void *const *)pHandle);
}

VGPU_EXPORT CUresult cuArrayDestroy(CUarray hArray)
{
    return destroyed(VGPU_KIND_ARRAY, hArray);
}

VGPU_EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
    return destroyed(VGPU_KIND_MIPMAP, hMipmappedArray);
}
