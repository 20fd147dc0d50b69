/*
 * gang.h: the devices of one tenant's turn. Its processes may be on different ones and ask one after the
 * other; their kernels may wait for each other, so the tenant has its devices together or not at all.
 *
 * One thread. Sets of devices are bits, by ordinal in the lease.
 */
#ifndef ARBITER_GANG_H
#define ARBITER_GANG_H

#include "sched_state.h"

/* What to ask for when a member wants `bits`: also the devices of members that were at work a moment ago. */
uint32_t gang_wanted(const struct sched_tenant *tenant, uint32_t bits, uint64_t now);

/* Devices that the tenant waits for, as bits; also while it holds others. */
uint32_t gang_missing(const struct sched_tenant *tenant);

/* For each of them: `d` is its ordinal in the lease. */
#define EACH_WANTED(tenant, d)                            \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if ((gang_missing(tenant) >> d & 1) != 0)

/* The devices that it waits for join its turn. */
void gang_extend(struct sched_tenant *tenant, uint64_t now);

/*
 * A member that is still running well after the end of the turn may have a kernel that waits for one which a
 * process of the same tenant holds back for a turn on another device. Then the tenant is stuck: for a while
 * all members on whose devices no process runs may go on, those too that end meanwhile, since the next kernels of the
 * first to go on may wait for theirs. If they end apart again, the same is done again.
 */
void gang_look(struct sched_tenant *tenant, uint64_t now);

/* May a waiting member have its tenant's turn? Of a stuck one: if nothing runs on its devices. */
bool gang_may_join(const struct sched_member *member);

/* Devices of a turn that none of its members uses go to a tenant that can use them at once. */
void gang_release(struct sched_tenant *tenant, uint64_t now);

/* When there may be something to release, or the tenant is stuck; SCHED_NEVER: not by time alone. */
uint64_t gang_next_look(const struct sched_tenant *tenant, uint64_t now);

#endif
