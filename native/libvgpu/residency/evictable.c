#include "evictable.h"

#include <stdlib.h>

#include "away.h"
#include "capture.h"
#include "device.h"
#include "functions.h"
#include "learn.h"
#include "piece.h"
#include "swap.h"
#include "tenant.h"

static void unmap_all(struct vgpu_piece *piece)
{
    for (unsigned i = 0; i < piece->chunk_count; i++)
        if (piece->chunks[i].handle != 0)
            vgpu_chunk_unmap(piece, i);
}

static bool has_granularity(CUdevice device)
{
    static size_t known; /* the same for all devices that a lease can have */
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    size_t now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (now == 0 && CALL(cuMemGetAllocationGranularity, &now, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS)
        __atomic_store_n(&known, now, __ATOMIC_RELAXED);
    return now == VGPU_PAGE_BYTES;
}

static struct vgpu_piece *make_piece(const struct vgpu_charge *charge, CUdevice device, uint64_t asked)
{
    unsigned count = (unsigned)((charge->bytes + VGPU_CHUNK_BYTES - 1) / VGPU_CHUNK_BYTES);
    struct vgpu_piece *piece = calloc(1, sizeof(*piece) + count * sizeof(piece->chunks[0]));
    if (piece == NULL)
        return NULL;
    piece->bytes = charge->bytes;
    piece->asked = asked;
    piece->device = device;
    piece->index = charge->device;
    piece->context = vgpu_charge_context();
    piece->chunk_count = count;
    CUresult result = CALL(cuMemAddressReserve, &piece->base, piece->bytes, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
        free(piece);
        return NULL;
    }
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = vgpu_chunk_map(piece, i);
    if (result == CUDA_SUCCESS)
        return piece;
    unmap_all(piece);
    CALL(cuMemAddressFree, piece->base, piece->bytes);
    free(piece);
    return NULL;
}

static void end_piece(struct vgpu_piece *piece)
{
    unmap_all(piece);
    CALL(cuMemAddressFree, piece->base, piece->bytes);
    vgpu_swap_holds(-(int64_t)piece->bytes);
    free(piece);
}

static bool remember(struct vgpu_charge *charge, struct vgpu_piece *piece)
{
    bool keep;
    struct vgpu_entry entry = {.kind = VGPU_KIND_MOVABLE, .key = piece->base, .owner = piece};
    vgpu_swap_holds((int64_t)piece->bytes);
    vgpu_charge_settle(charge, CUDA_SUCCESS, &entry, &keep);
    if (!keep)
        end_piece(piece);
    else
        vgpu_piece_link(piece);
    return keep;
}

bool vgpu_evictable_alloc(struct vgpu_charge *charge, uint64_t bytes, CUdeviceptr *pointer)
{
    CUdevice device;
    if (!charge->active || pointer == NULL || bytes <= VGPU_SHARED_MAX || !vgpu_swap_wanted() || vgpu_capture_any() ||
        vgpu_device_current(&device) != CUDA_SUCCESS || !has_granularity(device))
        return false;
    vgpu_swap_count();
    bool inside = vgpu_swap_enter();
    vgpu_evictable_sweep();
    struct vgpu_piece *piece = make_piece(charge, device, bytes);
    bool made = piece != NULL && remember(charge, piece);
    if (made)
        *pointer = piece->base;
    vgpu_swap_leave(inside);
    return made;
}

/* As the driver's own free does. */
static CUresult wait_for(CUcontext context)
{
    CUcontext popped;
    CUresult result = CALL(cuCtxPushCurrent_v2, context);
    if (result != CUDA_SUCCESS)
        return result;
    CUstreamCaptureMode mode = vgpu_capture_relax();
    result = CALL(cuCtxSynchronize);
    vgpu_capture_restore(mode);
    CALL(cuCtxPopCurrent_v2, &popped);
    return result;
}

/* The program has it no more. Inside. */
static CUresult let_go(const struct vgpu_entry *entry)
{
    struct vgpu_piece *piece = entry->owner;
    bool dead = vgpu_capture_any();
    CUresult result = dead ? CUDA_SUCCESS : wait_for(piece->context);
    if (result == CUDA_SUCCESS && !dead) {
        vgpu_piece_unlink(piece);
        end_piece(piece);
    }
    if (dead) {
        piece->dead = true;
        vgpu_learn_free_ends(); /* still charged: vgpu_evictable_sweep gives it back */
    } else {
        vgpu_charge_freed(entry, true, result);
    }
    return result;
}

static bool take(CUdeviceptr pointer, struct vgpu_entry *entry)
{
    if (!vgpu_table_take(VGPU_KIND_MOVABLE, pointer, entry))
        return false;
    vgpu_learn_free_begins();
    return true;
}

bool vgpu_evictable_free(CUdeviceptr pointer, CUresult *result)
{
    struct vgpu_entry entry;
    if (!vgpu_swap_counts() || !vgpu_table_get(VGPU_KIND_MOVABLE, pointer, &entry))
        return false;
    vgpu_away_call();
    bool inside = vgpu_swap_enter();
    bool ours = take(pointer, &entry);
    if (ours)
        *result = let_go(&entry);
    vgpu_evictable_sweep();
    vgpu_swap_leave(inside);
    return ours;
}

bool vgpu_evictable_free_after(CUdeviceptr pointer, CUstream stream, int per_thread, CUresult *result)
{
    struct vgpu_entry entry;
    if (!vgpu_swap_counts() || !vgpu_table_get(VGPU_KIND_MOVABLE, pointer, &entry))
        return false;
    *result = per_thread ? CALL(cuStreamSynchronize_ptsz, stream) : CALL(cuStreamSynchronize, stream);
    return *result != CUDA_SUCCESS || vgpu_evictable_free(pointer, result);
}

static void end_charged(struct vgpu_piece *piece)
{
    struct vgpu_entry entry = {.kind = VGPU_KIND_MOVABLE, .bytes = piece->bytes, .device = (int8_t)piece->index};
    vgpu_learn_free_begins();
    end_piece(piece);
    vgpu_charge_freed(&entry, true, CUDA_SUCCESS);
}

static bool is_dead(const struct vgpu_piece *piece, void *unused)
{
    (void)unused;
    return piece->dead;
}

void vgpu_evictable_sweep(void)
{
    if (vgpu_capture_any())
        return;
    for (struct vgpu_piece *piece; (piece = vgpu_piece_find(is_dead, NULL, true)) != NULL;) {
        wait_for(piece->context);
        end_charged(piece);
    }
}

struct range {
    CUdeviceptr pointer;
    CUdeviceptr *base;
    size_t *bytes;
};

static bool is_around(const struct vgpu_piece *piece, void *argument)
{
    const struct range *range = argument;
    if (range->pointer - piece->base >= piece->bytes)
        return false;
    if (range->base != NULL)
        *range->base = piece->base;
    if (range->bytes != NULL)
        *range->bytes = piece->asked;
    return true;
}

bool vgpu_evictable_range(CUdeviceptr pointer, CUdeviceptr *base, size_t *bytes)
{
    if (!vgpu_swap_counts())
        return false;
    struct range range = {pointer, base, bytes};
    return vgpu_piece_find(is_around, &range, false) != NULL;
}

/* One that another thread is freeing at this moment is left to it. */
static bool ends_with(const struct vgpu_piece *piece, void *context)
{
    struct vgpu_entry known;
    return piece->context == context && (piece->dead || vgpu_table_take(VGPU_KIND_MOVABLE, piece->base, &known));
}

void vgpu_evictable_end_context(CUcontext context)
{
    if (context == NULL || !vgpu_swap_counts())
        return;
    bool inside = vgpu_swap_enter();
    vgpu_swap_forget(context);
    for (struct vgpu_piece *piece; (piece = vgpu_piece_find(ends_with, context, true)) != NULL;)
        end_charged(piece);
    vgpu_swap_leave(inside);
}
