/*
 * standalone.h: limits without a daemon. A process without a lease but with HAMi's variables (hami_limits.h) creates a
 * lease folder in shared memory and follows it. The folder's name contains the user and a hash of the limits, so
 * exactly the processes of one user with the same limits share them.
 *
 * A user can change the variables, as with HAMi: this is for migration, and not a boundary.
 *
 * The caller has a lock, as for vgpu_lease_open.
 */
#ifndef VGPU_STANDALONE_H
#define VGPU_STANDALONE_H

#include <stdbool.h>

#include "lease_open.h"

/*
 * Sets view->folder, and creates the folder if it is missing. `computes`: the process is about to use CUDA, which names
 * the devices; else NVML does. Returns 1; 0: the variables set no limit; -EINVAL: they are invalid, see view->wrong;
 * -ENODEV: there is no device, or no driver; -EAGAIN: NVML is not initialised yet; other -errno.
 */
int vgpu_standalone_lease(struct vgpu_lease_view *view, bool computes);

#endif
