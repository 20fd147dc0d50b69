/*
 * charge.h: reserve, driver call, settle: the form of every wrapper that allocates.
 *
 * A wrapper makes a charge, calls the driver, and settles the charge with the driver's answer. A wrapper that frees
 * removes the entry from the table before it calls the driver, because another thread may get the same handle as soon
 * as the driver has released it; afterwards it drops the entry or puts it back.
 *
 * Any thread may call these functions. A charge belongs to its caller, and no lock is held between two calls. Sizes are
 * bytes. Precondition of functions that do not call vgpu_tenant_enter: it has set *limited to true. The wrapper has
 * vgpu_suspended_call() at its beginning, so that its call of the driver counts as inside the driver, too.
 */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H

#include <stdbool.h>

#include "cuda_api.h"
#include "table.h"

struct vgpu_charge {
    bool active; /* false: nothing is claimed, because the process is not limited or the claim has ended */
    int device;  /* index of the device in the lease */
    uint64_t bytes;
};

/*
 * Returns `bytes` rounded up to whole units; at most the largest multiple of the unit. A constant unit costs no
 * division.
 */
static inline uint64_t vgpu_round(uint64_t bytes, uint64_t unit)
{
    return bytes > UINT64_MAX - unit ? UINT64_MAX / unit * unit : (bytes + unit - 1) / unit * unit;
}

/*
 * Claims `bytes` in whole pages on a CUDA device, or on the current context's device. Returns CUDA_SUCCESS;
 * CUDA_ERROR_OUT_OF_MEMORY above the limit (the driver must then not be called); CUDA_ERROR_NOT_PERMITTED for a device
 * that is not in the lease; or an error of vgpu_tenant_enter. If the device is unknown (no current context), nothing is
 * charged, and the driver's call fails.
 */
CUresult vgpu_charge_device(struct vgpu_charge *charge, CUdevice device, uint64_t bytes);
CUresult vgpu_charge_current(struct vgpu_charge *charge, uint64_t bytes);

/* As vgpu_charge_device, for an index in the lease. Precondition: vgpu_tenant_enter has set *limited to true. */
CUresult vgpu_charge_index(struct vgpu_charge *charge, int index, uint64_t bytes);

/* Makes an active charge larger or smaller. Returns false, and keeps the old size, if it would exceed the limit. */
bool vgpu_charge_resize(struct vgpu_charge *charge, uint64_t bytes);

/* Removes the claim. Counts a refusal by the card if `result` is the driver's out-of-memory error. */
void vgpu_charge_undo(struct vgpu_charge *charge, CUresult result);

/*
 * Called with the driver's answer `result`. On success records the handle; otherwise removes the claim. Returns
 * `result`. If the handle could not be recorded, returns CUDA_ERROR_OUT_OF_MEMORY with *keep = false: the claim then
 * stays until the caller has freed the memory at the driver and calls vgpu_charge_undo.
 */
CUresult vgpu_charge_settle(struct vgpu_charge *charge, CUresult result, const struct vgpu_entry *entry, bool *keep);

/* As vgpu_charge_settle, for memory at `pointer` in the current context, with the requested `bytes`. */
CUresult vgpu_charge_pointer(struct vgpu_charge *charge, CUresult result, enum vgpu_kind kind, uint64_t pointer,
                             uint64_t bytes, bool *keep);

/*
 * Returns the owner of an entry: the current context, or the primary context of a green one; NULL if no context is
 * current.
 */
void *vgpu_charge_context(void);

/*
 * Called before and after the driver frees an allocation of the table: vgpu_charge_take removes the entry,
 * vgpu_charge_freed settles with the driver's result.
 */
bool vgpu_charge_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);
void vgpu_charge_freed(const struct vgpu_entry *entry, bool taken, CUresult result);

/*
 * As vgpu_charge_freed, for a free in stream order: until the driver frees the memory, it counts as the driver's own.
 */
void vgpu_charge_freed_later(const struct vgpu_entry *entry, bool taken, CUresult result);

/* Called when a context has ended, and with it its allocations. */
void vgpu_charge_end_context(CUcontext context);

#endif
