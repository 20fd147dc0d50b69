/*
 * channels.h: tracks the channels of this process that carry kernels. libvgpu wraps libc's ioctl(2), by which libcuda
 * creates and frees them (rm.h), records the groups with a compute object, and publishes them in the lease
 * (vgpu_channel_table). The arbiter uses them to preempt and resume this process.
 *
 * Only calls through the symbol ioctl are seen. A client of MPS has no channels of its own.
 *
 * Any thread may call these functions; an ioctl may come at any time, from the load of libvgpu on.
 */
#ifndef VGPU_CHANNELS_H
#define VGPU_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/* Publishes into the table of this slot from now on, if the file has one, including the channels known so far. */
void vgpu_channels_start(int usage_fd, uint32_t slot);

/* Stops tracking: this process is not limited. */
void vgpu_channels_ignore(void);

/* Publishes the channels with the devices that they are on now: the driver's restore may have moved them. */
void vgpu_channels_moved(void);

/* Has this process channels that carry kernels, and are all of them published? */
bool vgpu_channels_known(void);

/* Counts one sample of the process's own work, for the arbiter (struct vgpu_channel_table). */
void vgpu_channels_sample(bool unfinished);

/* Is this process off a device, according to the arbiter? */
bool vgpu_channels_off(void);

/*
 * Enables this process's own channels on the devices where they are disabled, after the end of the arbiter. `uuids`: the
 * lease's devices. False: the driver refused some; `again`: tries only those of the last call again.
 */
bool vgpu_channels_enable(const uint8_t (*uuids)[16], uint32_t count, bool again);

#endif
