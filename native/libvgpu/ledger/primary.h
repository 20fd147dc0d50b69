/*
 * primary.h: maps the green contexts of this process to their primary contexts.
 *
 * Any thread may call these functions. `visit` is called with the lock of this file held, and must call none of them.
 */
#ifndef VGPU_PRIMARY_H
#define VGPU_PRIMARY_H

#include "cuda_api.h"

/* Returns the primary context of a green context; any other context is returned unchanged. */
CUcontext vgpu_primary_of(CUcontext context);

/* Records that the green context `context` belongs to `primary`, on a device of the lease. At most 256 are recorded. */
void vgpu_primary_note(CUcontext context, CUcontext primary, int device);
void vgpu_primary_forget(CUcontext context);

/* Called before the primary context of this device ends: calls `visit` for each of its green contexts. */
void vgpu_primary_ends(int device, void (*visit)(CUcontext context));

/* Called when the primary context of this device has ended: forgets its green contexts. */
void vgpu_primary_ended(int device);

#endif
