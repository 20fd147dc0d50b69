/*
 * usage_guard.h: keeps `usage` files at their size, and notices when a process closes one.
 *
 * A tenant can write its own file, and all tenants share the file system. A file that grows, or allocates blocks beyond
 * its end, is truncated at once, and the truncation is counted. A store into a mapping, the only kind of write that
 * libvgpu makes, causes no event. A write(2) causes an event, and each event costs one unit of the lease's rate. While
 * a lease rests (rest.h), its file is checked at each tick instead. If a file that was open for writing is closed, a
 * process may have ended, so the next tick looks at the lease's claimed slots (unregistered.h).
 */
#ifndef ARBITER_USAGE_GUARD_H
#define ARBITER_USAGE_GUARD_H

struct lease;

/*
 * Creates the inotify instance. Must be called once, after loop_open. Returns 0 or -errno; after an error no file is
 * kept at its size, and no close is noticed.
 */
int usage_guard_open(void);

/*
 * usage_guard_begin: truncates the file if it is too large, and begins to watch it (lease->watch; -1 if it is not
 * watched).
 */
void usage_guard_begin(struct lease *lease);
void usage_guard_end(int watch);

/*
 * Watches the file again, as usage_guard_begin, if it is not watched: after the lease rested, or after events were
 * lost.
 */
void usage_guard_renew(struct lease *lease);

#endif
