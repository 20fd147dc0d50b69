/*
 * context.h: contexts of this process.
 *
 * Any thread may call these functions. Precondition: vgpu_tenant_enter said limited.
 */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

#include "cuda_api.h"

/* The primary context of a device of the lease while it is active, or NULL. */
CUcontext vgpu_context_primary(int index);

/* What kept a primary context besides the program's own references went: it may have ended. */
void vgpu_context_look(CUdevice dev);

#endif
