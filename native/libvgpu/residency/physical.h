/*
 * physical.h: physical memory of the program's own (cuMemCreate) that can leave the card. It comes back under another
 * handle of the driver, so the program has a name for it that libvgpu translates (families/vmm.c).
 *
 * Memory can be moved while it is mapped whole at one address with access for its own device. Precondition of each
 * function: the calling thread is inside (vgpu_swap_enter); vgpu_physical_make excepted.
 */
#ifndef VGPU_PHYSICAL_H
#define VGPU_PHYSICAL_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

struct vgpu_allocation;

/* A record of memory that the driver is asked for next, by its `prop`. NULL: it is not to be moved, or the host has no
 * memory. */
struct vgpu_allocation *vgpu_physical_make(uint64_t bytes, const CUmemAllocationProp *prop);

/* A name that no handle of the driver has. */
CUmemGenericAllocationHandle vgpu_physical_name(void);

/* Can it be moved from now on, with its mapping at `base`? */
void vgpu_physical_movable(struct vgpu_allocation *memory, CUdeviceptr base);
void vgpu_physical_fixed(struct vgpu_allocation *memory);

/* The context ends: memory that was mapped in it keeps its place. */
void vgpu_physical_end_context(CUcontext context);

#endif
