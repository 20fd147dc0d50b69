/*
 * charge.h: reserve -> driver call -> settle, the shape of every allocating wrapper.
 *
 * A wrapper asks for a charge, calls the driver, and settles with the driver's answer; a freeing
 * wrapper takes the entry out of the table before it calls the driver (another thread may be given
 * the same handle the moment the driver lets it go) and drops it or puts it back after.
 */
#ifndef VGPU_CHARGE_H
#define VGPU_CHARGE_H

#include <stdbool.h>

#include "cuda_api.h"
#include "table.h"

struct vgpu_charge {
    bool active; /* false: not limited, or nothing to charge */
    int device;  /* index in the lease */
    uint64_t bytes;
};

/* Bytes that one allocation takes at least: the driver's alignment of every pointer that it returns. */
#define VGPU_ROUND_BYTES 512u
uint64_t vgpu_round(uint64_t bytes);

/*
 * Reserves rounded `bytes` on a CUDA device, on the current context's, or on a stream's. Returns
 * CUDA_SUCCESS; CUDA_ERROR_OUT_OF_MEMORY over the limit (the driver is not entered);
 * CUDA_ERROR_NOT_PERMITTED for a device that is not in the lease; or an error of vgpu_tenant_enter. If the
 * device cannot be told (no current context), nothing is charged and the driver will say so.
 */
CUresult vgpu_charge_device(struct vgpu_charge *charge, CUdevice device, uint64_t bytes);
CUresult vgpu_charge_current(struct vgpu_charge *charge, uint64_t bytes);
CUresult vgpu_charge_stream(struct vgpu_charge *charge, CUstream stream, int per_thread, uint64_t bytes);

/* Makes an active charge larger or smaller; false (and the old size) if the limit is in the way. */
bool vgpu_charge_resize(struct vgpu_charge *charge, uint64_t bytes);

/* Gives the reservation back; counts a full card if that is what the driver said. */
void vgpu_charge_undo(struct vgpu_charge *charge, CUresult result);

/*
 * After the driver's answer `result`: on success remembers the handle, else gives the bytes back.
 * Returns `result`, or CUDA_ERROR_OUT_OF_MEMORY with *keep = false if the handle could not be
 * remembered (the caller must free it at the driver).
 */
CUresult vgpu_charge_settle(struct vgpu_charge *charge, CUresult result, const struct vgpu_entry *entry, bool *keep);

/* The current context as an entry's owner. */
void *vgpu_charge_context(void);

/* After the driver freed (or refused to free) what `entry` stood for. */
void vgpu_charge_freed(const struct vgpu_entry *entry, bool taken, CUresult result);

/* A context ended: what was allocated in it is gone. */
void vgpu_charge_end_context(CUcontext context);

void vgpu_charge_reset(void);

#endif
