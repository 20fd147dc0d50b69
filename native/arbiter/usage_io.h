/*
 * usage_io.h: the arbiter's access to a `usage` file. The tenant owns that file and may overwrite or truncate it. So
 * the arbiter never maps it (a truncated mapping would raise SIGBUS): every access is a bounded pread or pwrite, and
 * what is read affects only the tenant's own lease.
 */
#ifndef ARBITER_USAGE_IO_H
#define ARBITER_USAGE_IO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "lease.h"

/* Returns the owner word of a slot; 0 if the file is too short. */
uint32_t usage_io_owner(int usage_fd, uint32_t slot);

/* Reads `count` slots from `first` on. Returns the number of slots read, which is smaller if the file is too short. */
uint32_t usage_io_slots(int usage_fd, uint32_t first, struct vgpu_slot *slots, uint32_t count);

/*
 * Returns the host pid of the live process that holds the slot's lock; 0 if none does; -1 if the process is not in this
 * pid namespace.
 */
pid_t usage_io_holder(int usage_fd, uint32_t slot);

/*
 * Clears the slot if no process holds its lock, and adds its counters to the retired counters of the lease. Returns
 * true if it was cleared.
 */
bool usage_io_clear_if_dead(int usage_fd, uint32_t slot);

#endif
