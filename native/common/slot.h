/* slot.h: claiming and clearing slots of `usage` from inside a tenant process (see lease.h). */
#ifndef VGPU_SLOT_H
#define VGPU_SLOT_H

#include <stdbool.h>

#include "lease.h"

/*
 * Takes a slot: its lock, then a cleared body, then the owner word. `fd` is the process's one open
 * `usage` file: closing any descriptor of that file would drop the lock, so it stays open for life.
 * Returns the slot, or -EAGAIN if all slots have live owners, or another -errno of fcntl.
 */
int vgpu_slot_claim(int fd, struct vgpu_usage *usage);

/* Clears every slot whose owner is dead, except `own`: not merely dying, see dying.h. The arbiter does this by itself; a tenant
 * needs it only while the arbiter is away. Returns how many slots were cleared. */
int vgpu_slot_clear_dead(int fd, struct vgpu_usage *usage, uint32_t own);

/*
 * One process of the lease at a time makes its first context while nobody knows what one takes. Waits a
 * bounded time; false: it did not get the lock. Dropped by the kernel with the process, as slots are.
 */
bool vgpu_slot_lock_contexts(int fd);
void vgpu_slot_unlock_contexts(int fd);

#endif
