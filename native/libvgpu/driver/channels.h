/*
 * channels.h: the channels of this process that carry kernels, as the driver makes and frees them. libvgpu
 * stands in front of libc's ioctl(2), through which libcuda asks the driver for them (rm.h), notes the groups
 * that hold a compute object, and publishes them in the lease (vgpu_channel_table): with them the arbiter takes
 * this process off the device and puts it back.
 *
 * Only what passes through ioctl's symbol is seen. A client of MPS has no channels of its own.
 *
 * Any thread may call these functions; an ioctl may come at any time, from the load of libvgpu on.
 */
#ifndef VGPU_CHANNELS_H
#define VGPU_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/* Publishes into the table of this slot from now on, if the file has one; with what is known already. */
void vgpu_channels_start(int usage_fd, uint32_t slot);

/* This process is not limited: its channels are not noted any more. */
void vgpu_channels_ignore(void);

/* Has this process channels that carry kernels, and are all of them published? */
bool vgpu_channels_known(void);

/* Notes one look at the process's own work, for the arbiter (struct vgpu_channel_table). */
void vgpu_channels_sample(bool unfinished);

/* Is this process off a device, as far as the arbiter says? */
bool vgpu_channels_off(void);

/* Puts this process's own channels back on the device, if they are off. For a process whose arbiter is gone. False: the
 * driver refused some; `again`: those of the last call are tried again, and no others. */
bool vgpu_channels_enable(bool again);

#endif
