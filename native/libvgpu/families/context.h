/*
 * context.h: the contexts of this process.
 *
 * Any thread may call these functions. Precondition: vgpu_tenant_enter has set *limited to true.
 */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "cuda_api.h"

/* Returns the primary context of a device of the lease while it is active, or NULL. */
CUcontext vgpu_context_primary(int index);

/*
 * Checks whether a primary context has ended. Called when an object that kept it alive, such as a green context, has
 * ended.
 */
void vgpu_context_look(CUdevice dev);

#endif
