/* memory.c: plain allocations, such as cuMemAlloc. */
#include "suspended.h"
#include "charge.h"
#include "functions.h"
#include "evictable.h"

/*
 * Allocates memory. The first version of these calls has 32-bit pointers and sizes; otherwise all versions have the
 * same form.
 */
#define ALLOC_BODY(symbol, free_symbol, kind, pointer, bytes, evictable, ...)                                       \
    do {                                                                                                            \
        struct vgpu_charge charge;                                                                                  \
        bool keep;                                                                                                  \
        vgpu_suspended_call();                                                                                      \
        CUresult result = vgpu_charge_current(&charge, bytes);                                                      \
        if (result != CUDA_SUCCESS)                                                                                 \
            return result;                                                                                          \
        if (evictable)                                                                                              \
            return CUDA_SUCCESS;                                                                                    \
        result = CALL(symbol, __VA_ARGS__);                                                                         \
        result = vgpu_charge_pointer(&charge, result, kind, result == CUDA_SUCCESS ? *(pointer) : 0, bytes, &keep); \
        if (!keep) {                                                                                                \
            CALL(free_symbol, *(pointer));                                                                          \
            vgpu_charge_undo(&charge, CUDA_SUCCESS);                                                                \
        }                                                                                                           \
        return result;                                                                                              \
    } while (0)

VGPU_EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize)
{
    ALLOC_BODY(cuMemAlloc, cuMemFree, VGPU_KIND_POINTER, dptr, bytesize, false, dptr, bytesize);
}

VGPU_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    ALLOC_BODY(cuMemAlloc_v2, cuMemFree_v2, VGPU_KIND_POINTER, dptr, bytesize,
               vgpu_evictable_alloc(&charge, bytesize, dptr), dptr, bytesize);
}

VGPU_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    ALLOC_BODY(cuMemAllocManaged, cuMemFree_v2, VGPU_KIND_MANAGED, dptr, bytesize, false, dptr, bytesize, flags);
}

/* The driver chooses the pitch. The claim uses this guess of its alignment; the difference is settled afterwards. */
#define PITCH_GUESS_BYTES 512u

static uint64_t times(uint64_t a, uint64_t b)
{
    return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b;
}

#define PITCH_BODY(symbol, free_symbol, evictable)                                                                  \
    do {                                                                                                            \
        struct vgpu_charge charge;                                                                                  \
        bool keep;                                                                                                  \
        vgpu_suspended_call();                                                                                      \
        CUresult result = vgpu_charge_current(&charge, times(vgpu_round(WidthInBytes, PITCH_GUESS_BYTES), Height)); \
        if (result != CUDA_SUCCESS)                                                                                 \
            return result;                                                                                          \
        if (evictable)                                                                                              \
            return CUDA_SUCCESS;                                                                                    \
        result = CALL(symbol, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);                                \
        uint64_t bytes = charge.active && result == CUDA_SUCCESS ? times(*pPitch, Height) : 0;                      \
        if (bytes > 0 && !vgpu_charge_resize(&charge, bytes)) {                                                     \
            CALL(free_symbol, *dptr);                                                                               \
            vgpu_charge_undo(&charge, CUDA_SUCCESS);                                                                \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                        \
        }                                                                                                           \
        result = vgpu_charge_pointer(&charge, result, VGPU_KIND_POINTER, bytes > 0 ? *dptr : 0, bytes, &keep);      \
        if (!keep) {                                                                                                \
            CALL(free_symbol, *dptr);                                                                               \
            vgpu_charge_undo(&charge, CUDA_SUCCESS);                                                                \
        }                                                                                                           \
        return result;                                                                                              \
    } while (0)

static bool evictable_rows(struct vgpu_charge *charge, CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height)
{
    uint64_t row = vgpu_round(width, PITCH_GUESS_BYTES);
    if (pitch == NULL || !vgpu_evictable_alloc(charge, times(row, height), dptr))
        return false;
    *pitch = row;
    return true;
}

VGPU_EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes,
                                     unsigned int Height, unsigned int ElementSizeBytes)
{
    PITCH_BODY(cuMemAllocPitch, cuMemFree, false);
}

VGPU_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                        unsigned int ElementSizeBytes)
{
    PITCH_BODY(cuMemAllocPitch_v2, cuMemFree_v2, evictable_rows(&charge, dptr, pPitch, WidthInBytes, Height));
}

static bool take_pointer(uint64_t pointer, struct vgpu_entry *entry)
{
    return vgpu_charge_take(VGPU_KIND_POINTER, pointer, entry) || vgpu_charge_take(VGPU_KIND_MANAGED, pointer, entry);
}

VGPU_EXPORT CUresult cuMemFree(CUdeviceptr_v1 dptr)
{
    struct vgpu_entry entry;
    vgpu_suspended_call();
    bool taken = take_pointer(dptr, &entry);
    CUresult result = CALL(cuMemFree, dptr);
    vgpu_charge_freed(&entry, taken, result);
    return result;
}

VGPU_EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr)
{
    struct vgpu_entry entry;
    CUresult result;
    vgpu_suspended_call();
    if (vgpu_evictable_free(dptr, &result))
        return result;
    bool taken = take_pointer(dptr, &entry);
    result = CALL(cuMemFree_v2, dptr);
    vgpu_charge_freed(&entry, taken, result);
    return result;
}

/* libvgpu itself answers for evictable memory: for an allocation in several chunks the driver would report one chunk. */
VGPU_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    if (vgpu_evictable_range(dptr, pbase, psize))
        return CUDA_SUCCESS;
    vgpu_suspended_call();
    return CALL(cuMemGetAddressRange_v2, pbase, psize, dptr);
}
