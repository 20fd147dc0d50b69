/*
 * slot_lock.h: the lock that shows the arbiter and the lease's other processes that this process's slot is in use. It
 * is a lock of the process on the file `usage` (fcntl(2)), which is dropped when the process closes any descriptor of
 * that file; a program that closes all its descriptors (closefrom(3)) does so. While the process is registered with the
 * arbiter, it keeps its slot without the lock; a restarted arbiter finds processes by their locks only. So the link
 * takes the lock again before each registration.
 *
 * Any thread may call these functions; a lock of this file's own guards them.
 */
#ifndef VGPU_SLOT_LOCK_H
#define VGPU_SLOT_LOCK_H

#include <stdint.h>

#include "lease.h"

/*
 * Records that this process has locked `slot` by `fd`, which this file owns from now on. The caller keeps `folder`, the
 * lease's folder, valid until vgpu_slot_lock_drop.
 */
void vgpu_slot_lock_start(const char *folder, struct vgpu_usage *usage, uint32_t slot, int fd);

/*
 * Returns the descriptor of `usage` that locks the slot. If the program closed it, locks the slot again by a new one.
 * -errno: `usage` cannot be opened, was replaced, or another process has the slot.
 */
int vgpu_slot_lock_hold(void);

/* Closes the descriptor, unless the program did, which unlocks the slot. */
void vgpu_slot_lock_drop(void);

#endif
