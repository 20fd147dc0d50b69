/*
 * usage_guard.h: keeps `usage` files at their size, and notices when a process closes one.
 *
 * A tenant may write its own, and the file system that they are on is shared by all tenants: one that grows, or takes room beyond its
 * end, is cut back at once, and that is counted. Mapped stores, which is all that libvgpu does, are no events; writes are, the
 * arbiter's own too, and cost the lease's rate one unit each. While a lease rests (rest.h) its file is looked at with each
 * tick instead. A close of a file that was open for writing is the sign that a process may have ended: the next tick looks
 * at the lease's claimed slots (unregistered.h).
 */
#ifndef ARBITER_USAGE_GUARD_H
#define ARBITER_USAGE_GUARD_H

struct lease;

/* Begins to watch; call once, after loop_open. 0 or -errno; after an error no file is kept at its size, and no close is
 * noticed. */
int usage_guard_open(void);

/* Cuts the open file down if it is too large, and watches it from now on (lease->watch; -1: it is not watched). */
void usage_guard_begin(struct lease *lease);
void usage_guard_end(int watch);

/* As usage_guard_begin, if the file is not watched: after the lease rested, or after events were lost. */
void usage_guard_renew(struct lease *lease);

#endif
