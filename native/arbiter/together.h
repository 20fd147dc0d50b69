/* together.h: the devices of one tenant's turn. Its processes may be on different ones and ask one after the
 * other; their kernels may wait for each other, so the tenant has its devices together or not at all. */
#ifndef ARBITER_TOGETHER_H
#define ARBITER_TOGETHER_H

#include "scheduler.h"

#define TOGETHER_JOIN_NS 1000000u /* length of the turn of a member that joins a stuck tenant */

/* What to ask for when a member wants `bits`: also the devices of members that were at work a moment ago. */
uint32_t together_wanted(const struct sched_tenant *tenant, uint32_t bits, uint64_t now);

/* Devices that the tenant waits for, as bits; also while it holds others. */
uint32_t together_missing(const struct sched_tenant *tenant);

/* The devices that it waits for join its turn. */
void together_extend(struct sched_tenant *tenant, uint64_t now);

/* Is a member still running well after the end of the turn that it began in time? Its kernel may be waiting
 * for one that a process of the same tenant holds back for a turn on another device. */
bool together_is_stuck(const struct sched_tenant *tenant, uint64_t now);

/* May a waiting member have its tenant's turn? Of a stuck one: if nothing of before runs on its devices. */
bool together_may_join(const struct sched_member *member);

/* Devices of a turn that none of its members uses go to somebody who can use them at once. */
void together_release(struct sched_tenant *tenant, uint64_t now);

/* When there may be something to release, or the tenant is stuck; SCHED_NEVER: not by time alone. */
uint64_t together_next_look(const struct sched_tenant *tenant, uint64_t now);

#endif
