/*
 * slot.h: claims and clears slots of `usage` from inside a tenant process (see lease.h).
 *
 * Precondition: only one thread calls at a time. `fd` is a descriptor of the `usage` file, open for writing, which
 * fcntl(2) can lock.
 */
#ifndef VGPU_SLOT_H
#define VGPU_SLOT_H

#include <stdbool.h>

#include "lease.h"

/*
 * Takes a slot: its lock first, then clears its content, then writes the owner word. `fd` is the process's only open
 * `usage` file: closing any descriptor of that file would drop the lock, so it stays open until the process ends.
 * Returns the slot, -EAGAIN if the owners of all slots are alive or dying, or another -errno of fcntl.
 */
int vgpu_slot_claim(int fd, struct vgpu_usage *usage);

/*
 * Locks the slot that this process claimed at `start_ns` again by `fd`, another open `usage` file, after all
 * descriptors of the earlier one were closed. If the slot was cleared or taken meanwhile, the process owns it again,
 * with cleared words. Returns 0, or -errno of fcntl: -EAGAIN or -EACCES while another process has the lock.
 */
int vgpu_slot_lock_again(int fd, struct vgpu_usage *usage, uint32_t slot, uint64_t start_ns);

/* Returns whether a slot other than `own` has an owner, alive or dead. */
bool vgpu_slot_others(const struct vgpu_usage *usage, uint32_t own);

/*
 * Clears the slots whose lock no process holds, except `own` and those of dying processes (dying.h). Usually the
 * arbiter clears the slots of registered processes. With `registered` this function clears them too: there is no
 * arbiter then. Returns how many slots were cleared.
 */
int vgpu_slot_clear_dead(int fd, struct vgpu_usage *usage, uint32_t own, bool registered);

/*
 * Waits up to 1 s while the arbiter clears slots of registered processes that have ended. A pid is looked up in the
 * caller's pid namespace, so a process in another namespace counts as ended when it has no lock. Returns true if a slot
 * was cleared meanwhile.
 */
bool vgpu_slot_await_clear(int fd, const struct vgpu_usage *usage, uint32_t own);

/*
 * Serialises the first contexts of a lease's processes while the size of a context is not known. Waits 2 s at most;
 * returns false if it did not get the lock in that time. The kernel releases the lock when the process ends, as for
 * slots.
 */
bool vgpu_slot_lock_contexts(int fd);
void vgpu_slot_unlock_contexts(int fd);

#endif
