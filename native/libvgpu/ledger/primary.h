/*
 * primary.h: the primary context behind each green context of this process: a green context is a name of it.
 *
 * Any thread may call these functions; `visit` is called with this file's lock held, and calls none of them.
 */
#ifndef VGPU_PRIMARY_H
#define VGPU_PRIMARY_H

#include "cuda_api.h"

/* The primary context behind a green context's name; any other context as it is. */
CUcontext vgpu_primary_of(CUcontext context);

/* `context` is a name of `primary`, of a device of the lease. Beyond 256 names a further one is not known. */
void vgpu_primary_note(CUcontext context, CUcontext primary, int device);
void vgpu_primary_forget(CUcontext context);

/* The primary context of this device of the lease is about to end: `visit` is told its names. */
void vgpu_primary_ends(int device, void (*visit)(CUcontext context));

/* It is gone, and its names with it. */
void vgpu_primary_ended(int device);

#endif
