/*
 * rest.h: a lease whose processes ask too much of the arbiter rests. Its listener is not looked at, and a connection
 * that says anything is closed, until its rate (rate.h) has filled again; limits stay as they were, as without an
 * arbiter. One whose locks are so many that each look at one takes long (aside.h) is not looked at any more: libvgpu sets
 * one a process, so such a tenant is hostile, and what it holds stays charged to it.
 */
#ifndef ARBITER_REST_H
#define ARBITER_REST_H

#include "leases.h"

/* `tick` is called every 100 ms for each lease that rests, and once after rest_look_later: then `look` is true. It may call
 * rest_look_later for the next tick. Call once, after loop_open. 0 or -errno. */
int rest_open(void (*tick)(struct lease *lease, bool look));

/* Takes units from the lease's rate; false: it rests now. */
bool rest_afford(struct lease *lease, uint32_t units);

/* As above, of what has been measured: nanoseconds of a processor for one look at the lease's locks or processes (aside.h). */
void rest_spent_on_look(struct lease *lease, uint64_t ns);

/* The next tick is to look at the lease's processes and slots. */
void rest_look_later(struct lease *lease);

/* The lease is about to go. */
void rest_forget(struct lease *lease);

#endif
