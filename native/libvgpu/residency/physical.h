/*
 * physical.h: physical memory that the program makes itself (cuMemCreate) and that can leave the card. When it comes
 * back, the driver gives it another handle. So the program gets a name from libvgpu instead of a handle, and libvgpu
 * translates the name (families/vmm.c).
 *
 * Such memory can be moved while it is mapped as a whole at one address, with access for its own device only.
 * Precondition of each function except vgpu_physical_make: the calling thread is inside (vgpu_swap_enter).
 */
#ifndef VGPU_PHYSICAL_H
#define VGPU_PHYSICAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

struct vgpu_allocation;

/*
 * Returns a record for memory that the caller is about to create. The caller passes the driver the `prop` of the record,
 * which is a copy of `prop` without RDMA. Returns NULL if libvgpu does not evict such memory, or the host has no memory
 * for the record.
 */
struct vgpu_allocation *vgpu_physical_make(uint64_t bytes, const CUmemAllocationProp *prop);

/* Returns a name that no handle of the driver has. */
CUmemGenericAllocationHandle vgpu_physical_name(void);

/*
 * Record that the memory, mapped at `base`, can be moved from now on (if a context is current); or that it cannot be
 * moved (_fixed).
 */
void vgpu_physical_movable(struct vgpu_allocation *memory, CUdeviceptr base);
void vgpu_physical_fixed(struct vgpu_allocation *memory);

/* Called when a context ends: memory that was mapped in it can no longer be moved, and stays on the device. */
void vgpu_physical_end_context(CUcontext context);

#endif
