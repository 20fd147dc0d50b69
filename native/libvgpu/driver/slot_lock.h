/*
 * slot_lock.h: the lock which shows the arbiter and the lease's other processes that this process's slot is in use. It
 * is a lock of the process on the file `usage` (fcntl(2)). The kernel drops it when the process closes any descriptor
 * of that file; a program that closes all its descriptors (closefrom(3)) does this. While the process is registered
 * with the arbiter, it keeps its slot without the lock. But a restarted arbiter finds processes only by their locks, so
 * the link takes the lock again before each registration.
 *
 * Any thread may call these functions; a mutex guards the state.
 */
#ifndef VGPU_SLOT_LOCK_H
#define VGPU_SLOT_LOCK_H

#include <stdint.h>

#include "lease.h"

/*
 * Records that this process has locked `slot` by `fd`, which belongs to this file from now on. The caller keeps the
 * lease's `folder` valid until vgpu_slot_lock_drop.
 */
void vgpu_slot_lock_start(const char *folder, struct vgpu_usage *usage, uint32_t slot, int fd);

/*
 * Returns the descriptor of `usage` that locks the slot. If the program closed it, locks the slot again by a new one.
 * Returns -errno if `usage` cannot be opened, was replaced, or another process has the slot.
 */
int vgpu_slot_lock_hold(void);

/* Closes the descriptor, which unlocks the slot, unless the program has closed it already. */
void vgpu_slot_lock_drop(void);

#endif
