/*
 * charge.h: reserve -> driver call -> settle, the shape of every allocating wrapper.
 *
 * A wrapper asks for a charge, calls the driver, and settles with the driver's answer; a freeing
 * wrapper takes the entry out of the table before it calls the driver (another thread may be given
 * the same handle the moment the driver lets it go) and drops it or puts it back after.
 *
 * Any thread may call these functions; a charge is its caller's own, and no lock is held between two calls. Sizes are
 * bytes. Precondition of those without vgpu_tenant_enter in them: it said limited.
 */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H

#include <stdbool.h>

#include "cuda_api.h"
#include "table.h"

struct vgpu_charge {
    bool active; /* false: not limited, or without bytes to charge */
    int device;  /* index in the lease */
    uint64_t bytes;
};

static inline uint64_t vgpu_round(uint64_t bytes,
                                  uint64_t unit) /* rounded up to whole units; a constant unit costs no division */
{
    return bytes > UINT64_MAX - unit ? UINT64_MAX / unit * unit : (bytes + unit - 1) / unit * unit;
}

/*
 * Claims `bytes` in whole pages on a CUDA device, or on the current context's. Returns CUDA_SUCCESS;
 * CUDA_ERROR_OUT_OF_MEMORY over the limit (the driver is not entered); CUDA_ERROR_NOT_PERMITTED for a device that is
 * not in the lease; or an error of vgpu_tenant_enter. If the device is unknown (no current context), nothing is
 * charged, and the driver's call fails.
 */
CUresult vgpu_charge_device(struct vgpu_charge *charge, CUdevice device, uint64_t bytes);
CUresult vgpu_charge_current(struct vgpu_charge *charge, uint64_t bytes);

/* As vgpu_charge_device for an index in the lease, after vgpu_tenant_enter said limited. */
CUresult vgpu_charge_index(struct vgpu_charge *charge, int index, uint64_t bytes);

/* Makes an active charge larger or smaller; false, with the old size, if it would exceed the limit. */
bool vgpu_charge_resize(struct vgpu_charge *charge, uint64_t bytes);

/* Gives the claim back; counts a refusal of the card if that was the driver's result. */
void vgpu_charge_undo(struct vgpu_charge *charge, CUresult result);

/*
 * After the driver's answer `result`: on success remembers the handle, else gives the bytes back.
 * Returns `result`, or CUDA_ERROR_OUT_OF_MEMORY with *keep = false if the handle could not be
 * remembered: the claim stands until the caller has freed it at the driver, and undoes it.
 */
CUresult vgpu_charge_settle(struct vgpu_charge *charge, CUresult result, const struct vgpu_entry *entry, bool *keep);

/* The same for memory at `pointer` in the current context, of `bytes` as asked for. */
CUresult vgpu_charge_pointer(struct vgpu_charge *charge, CUresult result, enum vgpu_kind kind, uint64_t pointer,
                             uint64_t bytes, bool *keep);

/* The current context as an entry's owner. */
void *vgpu_charge_context(void);

/*
 * Around the driver's free of an allocation in the table: vgpu_charge_take removes the entry, vgpu_charge_freed settles
 * with the driver's result.
 */
bool vgpu_charge_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry);
void vgpu_charge_freed(const struct vgpu_entry *entry, bool taken, CUresult result);

/* The same for a free in stream order: until the driver frees the memory, it counts as driver overhead. */
void vgpu_charge_freed_later(const struct vgpu_entry *entry, bool taken, CUresult result);

/* Called when a context has ended: its allocations no longer exist. */
void vgpu_charge_end_context(CUcontext context);

#endif
