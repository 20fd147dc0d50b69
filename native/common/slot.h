/* slot.h: claiming and clearing slots of `usage` from inside a tenant process (see lease.h). */
#ifndef VGPU_SLOT_H
#define VGPU_SLOT_H

#include "lease.h"

/*
 * Takes a slot: its lock, then a cleared body, then the owner word. `fd` is the process's one open
 * `usage` file: closing any descriptor of that file would drop the lock, so it stays open for life.
 * Returns the slot, or -EAGAIN if all slots have live owners, or another -errno of fcntl.
 */
int vgpu_slot_claim(int fd, struct vgpu_usage *usage);

/* Clears every slot whose owner is dead, except `own`. The arbiter does this by itself; a tenant
 * needs it only while the arbiter is away. Returns how many slots were cleared. */
int vgpu_slot_clear_dead(int fd, struct vgpu_usage *usage, uint32_t own);

#endif
