/*
 * gang.h: gang scheduling of one tenant's devices. The tenant's processes may use different devices and request them
 * one after the other. Their kernels may wait for each other, so the tenant gets all of its devices together or none.
 *
 * Only one thread may call it. Sets of devices are bits, by ordinal in the lease.
 */
#ifndef ARBITER_GANG_H
#define ARBITER_GANG_H

#include "sched_state.h"

/*
 * Returns the devices to request when a process wants `bits`. They include the devices of processes that worked
 * recently.
 */
uint32_t gang_wanted(const struct sched_tenant *tenant, uint32_t bits, uint64_t now);

/*
 * Returns the devices for which the tenant waits, as bits, also while it holds others; none while its slice ends,
 * unless it is stuck.
 */
uint32_t gang_missing(const struct sched_tenant *tenant);

/* Iterates over the devices for which the tenant waits: `d` is the ordinal in the lease. */
#define EACH_WANTED(tenant, d)                            \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if ((gang_missing(tenant) >> d & 1) != 0)

/* Adds the devices for which the tenant waits to its slice. */
void gang_extend(struct sched_tenant *tenant, uint64_t now);

/*
 * Detects a stuck tenant. If a process runs long after the end of the slice, its kernel may wait for a kernel of
 * another process of the tenant, which waits for a slice on another device. Then each waiting process on whose devices
 * no process of the tenant runs may continue for JOIN_NS. A process that gives its part of the slice back meanwhile may
 * continue again, because later kernels may wait for its kernels. If the tenant is still stuck after this time, the
 * time is granted again.
 */
void gang_look(struct sched_tenant *tenant, uint64_t now);

/*
 * May a waiting process join its tenant's slice? In a stuck tenant it may only if no other process of the tenant runs
 * on the devices that it uses.
 */
bool gang_may_join(const struct sched_member *member);

/*
 * Frees the devices of a slice that no process has used for UNUSED_MAX_NS while others of its devices are used, if the
 * next tenant can use them at once.
 */
void gang_release(struct sched_tenant *tenant, uint64_t now);

/*
 * Returns the time at which devices may be released, or the tenant becomes stuck; SCHED_NEVER if no such time is known.
 */
uint64_t gang_next_look(const struct sched_tenant *tenant, uint64_t now);

#endif
