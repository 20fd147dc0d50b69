/*
 * context.h: the contexts of this process.
 *
 * Any thread may call these functions. Precondition: vgpu_tenant_enter returned "limited".
 */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "cuda_api.h"

/* The primary context of a device of the lease while it is active, or NULL. */
CUcontext vgpu_context_primary(int index);

/*
 * Called when an object that kept a primary context, such as a green context, has ended: checks whether the primary
 * context has ended.
 */
void vgpu_context_look(CUdevice dev);

#endif
