/*
 * device.h: maps the driver's device ordinals to the devices of the lease, by UUID.
 *
 * Any thread may call these functions. Precondition: vgpu_tenant_enter has set *limited to true.
 */
#ifndef VGPU_DEVICE_H
#define VGPU_DEVICE_H

#include "cuda_api.h"

#define VGPU_NOT_IN_LEASE (-1)

/* Returns the index in the lease of a CUDA device, or VGPU_NOT_IN_LEASE. */
int vgpu_device_index(CUdevice device);

/* Prints, once in a process, that a CUDA device is not in the lease, and which allocation and device the lease is for. */
void vgpu_device_tell_foreign(CUdevice device);

/*
 * Find the device of the current context, of a context, or of a stream. Return the driver's error if there is none. If
 * the process sees one device only, vgpu_device_of_stream returns that one.
 */
CUresult vgpu_device_current(CUdevice *device);
CUresult vgpu_device_of_context(CUcontext context, CUdevice *device);
CUresult vgpu_device_of_stream(CUstream stream, int per_thread, CUdevice *device);

/*
 * Index in the lease of the only device that this process sees. VGPU_NOT_IN_LEASE if there are several, or if it is not
 * known yet: vgpu_device_of_stream finds it out.
 */
extern int vgpu_device_known_alone; /* index in the lease of the process's only device, plus 1 */
static inline int vgpu_device_alone(void)
{
    return __atomic_load_n(&vgpu_device_known_alone, __ATOMIC_RELAXED) - 1;
}

#endif
