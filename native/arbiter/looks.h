/*
 * looks.h: a queue of leases with due looks. A look checks a lease's locks or processes, and the tenant can make it
 * slow (aside.h). Each turn of the loop (loop.h) makes at most one look. The leases take turns, so if all processes of
 * a tenant end at once, the message of another registered tenant waits for at most one look.
 */
#ifndef ARBITER_LOOKS_H
#define ARBITER_LOOKS_H

#include "lease_record.h"

/*
 * Starts the queue. `look_at_one` makes one due look at the lease, and returns false if none is due. Must be called
 * once, after loop_open. Returns 0 or -errno.
 */
int looks_open(bool (*look_at_one)(struct lease *lease));

/* Queues a look at the lease, unless one is queued. */
void looks_add(struct lease *lease);

/* Removes from the queue a lease that is about to be freed. */
void looks_forget(struct lease *lease);

#endif
