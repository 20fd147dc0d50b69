/*
 * rest.h: limits the load that a lease's processes cause for the arbiter. A lease above its rate rests: its listener is
 * not read, and a connection that sends a message is closed, until a quarter of its token bucket (rate.h) is full. Its
 * limits stay in force, as without an arbiter. A lease with so many locks that each look takes long (aside.h) gets no
 * further looks, and rests until it is removed. libvgpu sets one lock for each process, so such a tenant is hostile.
 * The memory that it holds stays charged to it.
 */
#ifndef ARBITER_REST_H
#define ARBITER_REST_H

#include "lease_record.h"

/*
 * Starts this module. `tick` is called every 100 ms for each lease that rests, and once after rest_look_later, with
 * `look` true. `tick` may call rest_look_later for the next tick. rest_open must be called once, after loop_open.
 * Returns 0 or -errno.
 */
int rest_open(void (*tick)(struct lease *lease, bool look));

/* Takes units from the lease's token bucket. Returns false if the lease rests now. */
bool rest_afford(struct lease *lease, uint32_t units);

/*
 * Takes units for measured time: nanoseconds of processor time for one look at the lease's locks or processes
 * (aside.h). A lease whose looks took long several times in a row gets no further looks.
 */
void rest_spent_on_look(struct lease *lease, uint64_t ns);

/* Makes the next tick look at the lease's processes and slots. */
void rest_look_later(struct lease *lease);

/* Takes a lease that is about to be freed off the list of leases that get ticks. */
void rest_forget(struct lease *lease);

#endif
