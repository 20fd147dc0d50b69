#include "allocate.h"

#include <string.h>

#define ROW_BYTES 65536u

static CUresult make_vmm(uint64_t bytes, int device, uint64_t *handle)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUmemGenericAllocationHandle made = 0;
    CUresult result = cu.cuMemCreate(&made, bytes, &properties, 0);
    *handle = made;
    return result;
}

static CUresult make_array(uint64_t bytes, uint64_t *handle)
{
    CUDA_ARRAY_DESCRIPTOR shape = {
        .Width = ROW_BYTES / 4, .Height = bytes / ROW_BYTES, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
    CUarray made = NULL;
    CUresult result = cu.cuArrayCreate_v2(&made, &shape);
    *handle = (uint64_t)(uintptr_t)made;
    return result;
}

static CUresult make_pointer(const char *family, uint64_t bytes, uint64_t *handle)
{
    CUdeviceptr pointer = 0;
    size_t pitch;
    CUresult result;
    if (strcmp(family, "pitch") == 0)
        result = cu.cuMemAllocPitch_v2(&pointer, &pitch, ROW_BYTES, bytes / ROW_BYTES, 4);
    else if (strcmp(family, "managed") == 0)
        result = cu.cuMemAllocManaged(&pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    else if (strcmp(family, "async") == 0)
        result = cu.cuMemAllocAsync(&pointer, bytes, NULL);
    else
        result = cu.cuMemAlloc_v2(&pointer, bytes);
    *handle = pointer;
    return result;
}

bool family_known(const char *family)
{
    static const char *const known[] = {"alloc", "pitch", "managed", "async", "vmm", "array"};
    for (unsigned i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(family, known[i]) == 0)
            return true;
    return false;
}

CUresult piece_make(const char *family, uint64_t bytes, int device, struct piece *piece)
{
    piece->bytes = bytes;
    if (strcmp(family, "vmm") == 0)
        return make_vmm(bytes, device, &piece->handle);
    if (strcmp(family, "array") == 0)
        return make_array(bytes, &piece->handle);
    return make_pointer(family, bytes, &piece->handle);
}

CUresult piece_drop(const char *family, const struct piece *piece)
{
    if (strcmp(family, "vmm") == 0)
        return cu.cuMemRelease(piece->handle);
    if (strcmp(family, "array") == 0)
        return cu.cuArrayDestroy((CUarray)(uintptr_t)piece->handle);
    if (strcmp(family, "async") == 0)
        return cu.cuMemFreeAsync(piece->handle, NULL);
    return cu.cuMemFree_v2(piece->handle);
}
