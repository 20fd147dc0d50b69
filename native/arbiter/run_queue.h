/*
 * run_queue.h: the order in which waiting tenants get their time slices.
 *
 * Only one thread may call it. Precondition: fair_refresh was called for each device with this `now`.
 */
#ifndef ARBITER_RUN_QUEUE_H
#define ARBITER_RUN_QUEUE_H

#include "sched_state.h"

/* Returns 0 if the tenant may have a slice now; otherwise the nanoseconds for which its `hard` share makes it wait. */
uint64_t run_queue_must_wait(const struct sched_tenant *tenant);

/* Returns whether the waiting tenant has been without a slice for so long that priorities no longer count. */
bool run_queue_starved(const struct sched_tenant *tenant, uint64_t now);

/*
 * Marks on every managed device which waiting tenant gets it next (device->next_entity; NULL: none may). A tenant is
 * marked on all devices that it wants or on none. The first tenant in the queue is always marked, so that it gets all
 * of its devices even if they are busy. A later tenant is marked if no tenant that is marked before it wants one of its
 * devices.
 */
void run_queue_mark(struct sched_tenant *tenants, struct sched_device *devices, uint64_t now);

#endif
