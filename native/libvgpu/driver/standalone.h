/*
 * standalone.h: limits with no daemon. Where a process has no lease but HAMi's variables (hami_limits.h), it
 * makes a lease folder of its own in shared memory and keeps to that. The folder's name holds the user and a
 * hash of the limits, so processes of one user with the same limits, and only those, share them.
 *
 * A user can change the variables: this is for moving over, and no more than it is with HAMi.
 *
 * The caller has a lock, as for vgpu_lease_open.
 */
#ifndef VGPU_STANDALONE_H
#define VGPU_STANDALONE_H

#include <stdbool.h>

#include "lease_open.h"

/*
 * Sets view->folder and makes it if it is not there. `computes`: the process is about to use CUDA, which names
 * the devices; else NVML does. Returns 1; 0: the variables ask for nothing; -EINVAL: they are wrong, view->wrong
 * says which; -ENODEV: there is no device, or no driver; -EAGAIN: NVML is not initialised yet; other -errno.
 */
int vgpu_standalone_lease(struct vgpu_lease_view *view, bool computes);

#endif
