/*
 * standalone.h: limits without a daemon. A process without a lease but with HAMi's variables (hami_limits.h) creates a
 * lease folder in shared memory and follows it. The folder's name contains the user and a hash of the devices, the
 * limits and the variable CUDA_DEVICE_MEMORY_SHARED_CACHE. Processes that agree in all of these share the folder.
 *
 * A user can change the variables, as with HAMi, so this is for migration and no security boundary.
 *
 * The caller holds a lock, as for vgpu_lease_open.
 */
#ifndef VGPU_STANDALONE_H
#define VGPU_STANDALONE_H

#include <stdbool.h>

#include "lease_open.h"

/*
 * Sets view->folder, and creates the folder if it is missing. `computes`: the process is about to use CUDA, which names
 * the devices; otherwise NVML names them. Returns 1 on success; 0 if no variable for a limit is set; -EINVAL if a
 * variable is invalid, see view->wrong; -ENODEV if there is no device or no driver; -EAGAIN if NVML is not initialised
 * yet; another -errno.
 */
int vgpu_standalone_lease(struct vgpu_lease_view *view, bool computes);

#endif
