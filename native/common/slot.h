/*
 * slot.h: claiming and clearing slots of `usage` from inside a tenant process (see lease.h).
 *
 * The caller has a lock where two threads may call at once. POSIX locks are the process's: preconditions about `fd`
 * are those of fcntl(2).
 */
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

/*
 * Locks the slot that this process claimed at `start_ns` again by `fd`, another open `usage` file, after all descriptors of
 * the former were closed. A slot that was cleared or taken meanwhile is owned again: its figures are then as the clearing
 * left them. Returns 0, or -errno of fcntl: -EAGAIN or -EACCES while another process has the lock.
 */
int vgpu_slot_lock_again(int fd, struct vgpu_usage *usage, uint32_t slot, uint64_t start_ns);

/*
 * Clears the slots of dead processes, except `own`: not of those that are dying, see dying.h. The arbiter clears the slots of
 * the processes that registered with it; `registered` says that they are to be cleared as well, as no arbiter is there.
 * Returns how many slots were cleared.
 */
int vgpu_slot_clear_dead(int fd, struct vgpu_usage *usage, uint32_t own, bool registered);

/*
 * Waits up to 100 ms while the arbiter clears slots of registered processes that have ended. A pid is looked up in the
 * caller's pid namespace, so a process of another one counts as ended once it has no lock. True: a slot was cleared meanwhile.
 */
bool vgpu_slot_await_clear(int fd, const struct vgpu_usage *usage, uint32_t own);

/*
 * One process of the lease at a time makes its first context while it is not known what a context takes. Waits a
 * bounded time; false: it did not get the lock. Dropped by the kernel with the process, as slots are.
 */
bool vgpu_slot_lock_contexts(int fd);
void vgpu_slot_unlock_contexts(int fd);

#endif
