/*
 * channels.h: tracks the channels of this process that carry kernels. libvgpu wraps libc's ioctl(2), by which libcuda
 * creates, schedules and frees channels (rm.h), records the groups with a compute object, and publishes those that are
 * scheduled in the lease (vgpu_channel_table). The arbiter uses them to preempt and resume this process.
 *
 * Only calls through the symbol ioctl are seen. A client of MPS has no channels of its own.
 *
 * Any thread may call these functions. An ioctl may come at any time after libvgpu is loaded.
 */
#ifndef VGPU_CHANNELS_H
#define VGPU_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"

/* From now on publishes the channels, including those known so far, in the table of this slot, if the file has one. */
void vgpu_channels_start(int usage_fd, uint32_t slot);

/* Stops tracking, because this process is not limited. */
void vgpu_channels_ignore(void);

/* Publishes the channels with the devices on which they are now, because the driver's restore may have moved them. */
void vgpu_channels_moved(void);

/* Returns whether this process has channels that carry kernels, and all of them are published. */
bool vgpu_channels_known(void);

/* Writes how much memory of each kind an eviction leaves on the device, for vgpud. */
void vgpu_channels_stays(const uint64_t by_kind[VGPU_STAY_KINDS]);

/*
 * Adds a sample of the process's own work to the table, for the arbiter (struct vgpu_channel_table). The sample stands
 * for `ms` milliseconds. `unfinished`: the sample found unfinished work. `waits`: a thread was inside of the same
 * call for some time.
 */
void vgpu_channels_sample(bool unfinished, bool waits, uint32_t ms);

/* Returns whether the arbiter has disabled this process's channels on a device, or may have. */
bool vgpu_channels_off(void);

/*
 * Called if the arbiter has ended, or the engine cut has ended for this process: enables this process's own channels on
 * the devices where the arbiter had disabled them. `uuids` are the lease's devices. Returns false if the driver refused
 * a call; the function can then be called again.
 */
bool vgpu_channels_enable(const uint8_t (*uuids)[16], uint32_t count);

#endif
