/* green.h: green contexts: names of the primary context, each of which keeps it alive. */
#ifndef VGPU_GREEN_H
#define VGPU_GREEN_H

#include "cuda_api.h"

/* The primary context behind a green context's name; any other context as it is. */
CUcontext vgpu_green_primary(CUcontext context);

/* The primary context of this device of the lease is about to end: nothing of libvgpu's own stays in its green ones. */
void vgpu_green_ends(int device);

/* The primary context of this device of the lease is gone, and its green contexts' names with it. */
void vgpu_green_ended(int device);

void vgpu_green_reset(void);

#endif
