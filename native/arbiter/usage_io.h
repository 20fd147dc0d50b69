/*
 * usage_io.h: the arbiter's access to a `usage` file. The tenant owns that file and may overwrite or truncate it, so
 * nothing read from it is trusted beyond the tenant's own lease.
 *
 * A tenant can also delay any call that changes the file: write(2) holds the file's lock in the kernel while it reads
 * its buffer, which may be a page of the tenant's own file system (FUSE). So the event loop makes no such call. It
 * reads by pread, which takes no lock on tmpfs, and writes by usage_io_store. Other changes are made on another thread
 * (aside.h).
 */
#ifndef ARBITER_USAGE_IO_H
#define ARBITER_USAGE_IO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "lease.h"

/* Call once, before usage_io_store. Returns 0 or -errno. */
int usage_io_open(void);

/* Maps the file, whatever its size is. Returns NULL if it cannot be mapped. Unmapping NULL does nothing. */
unsigned char *usage_io_map(int usage_fd);
void usage_io_unmap(unsigned char *map);

/*
 * Reads or writes at `at` of the mapped file, without the file's lock in the kernel. If `map` is NULL, or the file
 * lacks the page, usage_io_load returns false and usage_io_store writes nothing.
 */
bool usage_io_load(const unsigned char *map, off_t at, void *data, size_t size);
void usage_io_store(unsigned char *map, off_t at, const void *data, size_t size);

/*
 * Is the page at `at` of the mapped file in memory? If it is not, a store waits: for a disk if the page is swapped out,
 * or for the tenant while it punches a hole into the file (fallocate(2), 0.2 s for each GiB). True if the kernel does
 * not say.
 */
bool usage_io_in_memory(const unsigned char *map, off_t at);

/* Brings the page at `at` of the file into memory. It can wait, so it is called on another thread (aside.h). */
void usage_io_bring_in(int usage_fd, off_t at);

/* Returns the owner word of a slot; 0 if the file is too short. */
uint32_t usage_io_owner(int usage_fd, uint32_t slot);

/* Reads `count` slots from `first` on. Returns the number of slots read, which is smaller if the file is too short. */
uint32_t usage_io_slots(int usage_fd, uint32_t first, struct vgpu_slot *slots, uint32_t count);

/*
 * Returns the host pid of the process that holds the slot's lock; 0 if none does or the lock cannot be read; -1 if the
 * holder is not in this pid namespace, or the lock belongs to an open file description.
 */
pid_t usage_io_holder(int usage_fd, uint32_t slot);

/*
 * Clears the slot if no process holds its lock, and adds its counters to the retired counters of the lease. Returns
 * true if no process held the lock; the slot is then clear.
 */
bool usage_io_clear_if_dead(int usage_fd, uint32_t slot);

#endif
