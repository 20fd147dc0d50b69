/*
 * looks.h: a queue of leases with due looks (aside.h). Each turn of the loop (loop.h) makes one look. The leases take turns,
 * so a tenant whose processes end all at once delays another registered tenant's message by one look.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_LOOKS_H
#define ARBITER_LOOKS_H

#include "leases.h"

/* `look_at_one` makes one due look of the lease. It returns false if none is due. Call once, after loop_open.
 * 0 or -errno. */
int looks_open(bool (*look_at_one)(struct lease *lease));

/* Queues a look at the lease. */
void looks_add(struct lease *lease);

/* Removes a lease that is about to be freed. */
void looks_forget(struct lease *lease);

#endif
