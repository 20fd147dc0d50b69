/*
 * slot_lock.h: the lock that tells the arbiter and the lease's other processes that this process's slot is in use. It
 * is a lock of the process on the file `usage` (fcntl(2)), which is dropped when the process closes any descriptor of
 * that file; a program that closes all its descriptors (closefrom(3)) does so. While the arbiter knows the process it
 * keeps the slot (identity_has_mapped); an arbiter that starts knows locks alone. So the link takes the lock again
 * before each registration.
 *
 * Any thread may call these functions; a lock of this file's own guards them.
 */
#ifndef VGPU_SLOT_LOCK_H
#define VGPU_SLOT_LOCK_H

#include <stdint.h>

#include "lease.h"

/*
 * Notes that this process has `slot` locked by `fd`, which belongs to this file from now on. `folder` is where the lease
 * is, and stays the caller's until vgpu_slot_lock_drop.
 */
void vgpu_slot_lock_start(const char *folder, struct vgpu_usage *usage, uint32_t slot, int fd);

/* The descriptor of `usage` by which the slot is locked: the known one, or where the program closed that, a new one by which
 * the slot is locked again. -errno: `usage` cannot be opened, is another file by now, or another process has the slot. */
int vgpu_slot_lock_hold(void);

/* Closes the descriptor, unless the program did: the slot is no longer locked. */
void vgpu_slot_lock_drop(void);

#endif
