/* leases.h: the leases that the arbiter serves, with their open files. Only one thread may call it. */
#ifndef ARBITER_LEASES_H
#define ARBITER_LEASES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "lease_record.h"

/*
 * Sets the folder leases/. The caller keeps the descriptor open. Must be called once, before any other function of this
 * file.
 */
void leases_open(int leases_fd);

/* Adds a lease to the list of served leases, or removes it. The caller owns the lease. */
void lease_link(struct lease *lease);
void lease_unlink(struct lease *lease);

/* Returns the linked lease with this name, or NULL. */
struct lease *lease_find(const char *id);

/* Returns the linked lease whose `usage` has this watch (usage_guard.h), or NULL. */
struct lease *lease_by_watch(int watch);

/* Calls `visit` for each linked lease. `visit` must not unlink a lease. */
void lease_each(void (*visit)(struct lease *lease));

/*
 * Returns a descriptor of the folder that contains the files of leases/<id> (which may be its folder anyone/, lease.h),
 * or -errno. The caller closes it. No link is followed but leases/<id> itself, which only root can make.
 */
int lease_open_folder(const char *id);

/*
 * Opens `limits` and `usage` without following links, maps `usage` (if that fails, usage_map is NULL), and sets *usage
 * to its status. Precondition: they are not open. Returns 0 or -errno; on failure both are closed again.
 */
int lease_open_files(int folder_fd, struct lease *lease, struct stat *usage);
/* closes the lease's files; returns the processor time in ns (aside.h) */
uint64_t lease_close_files(struct lease *lease);

/*
 * Opens `usage` with O_PATH, so that close(2) does not walk the file's locks. Returns a descriptor, or a negative
 * number.
 */
int lease_open_path(const struct lease *lease);

/*
 * Opens `usage` for reading; closing this descriptor causes no event in usage_guard.h. Returns a descriptor or -errno:
 * -ESTALE if the file is not the one with which the lease was added.
 */
int lease_open_to_read(const struct lease *lease);

/*
 * Keeps the lease's files open until the matching lease_release. The first hold opens them. Returns false, and holds
 * nothing, if the files cannot be opened or are not those with which the lease was added.
 */
bool lease_hold(struct lease *lease);
void lease_release(struct lease *lease);

#endif
