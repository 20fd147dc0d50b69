/*
 * scheduler.h: which tenant computes next. Pure: no I/O and no clock; time comes in as nanoseconds, and messages to
 * tenants go out through functions that the caller provides (turns.c, or a test). One thread, no locks. `now` never
 * goes back between two calls.
 *
 * A tenant (a lease) has an entity on each of its devices, and members (its registered processes). At
 * most one tenant holds a managed device at a time, all its members together; a tenant that wants
 * several devices gets them together. A device is managed while a tenant on it is under a limit that
 * matters: one `hard` tenant, or two tenants of which one has a share.
 */
#ifndef ARBITER_SCHEDULER_H
#define ARBITER_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "sched_state.h"

/* A new tenant without members. False: out of memory. */
bool sched_tenant_add(struct sched_tenant *tenant, uint32_t device_count, const char (*uuids)[VGPU_UUID_BYTES]);
void sched_tenant_remove(struct sched_tenant *tenant, uint64_t now);

/* New limits of one entity; takes effect with the next sched_run. */
void sched_set_limits(struct sched_tenant *tenant, uint32_t ordinal, const struct sched_limits *limits);

void sched_member_add(struct sched_tenant *tenant, struct sched_member *member, uint64_t now);
void sched_member_remove(struct sched_member *member, uint64_t now);

/* A member has launches waiting for these devices (bits; bits beyond the lease are ignored). */
void sched_want(struct sched_member *member, uint32_t devices, uint64_t now);

/* A member gave its turn back: number, MORE, and how long it idled at its end (believed up to a bound, as it
 * is when the member says that it runs nothing). Stale turn numbers are ignored. */
void sched_done(struct sched_member *member, const struct vgpu_turn *turn, uint64_t now);

/* A member that is cut has nothing to do any more, in a turn or waiting for one, and had nothing for `idle_ns`
 * (believed up to a bound). */
void sched_idle(struct sched_member *member, uint64_t idle_ns, uint64_t now);

/* All cut members of the tenant are off its devices, as sched_messages.revoke asked for; of the turn nothing of them
 * ran for `lost_ns`. They want the next turn: one that does not says sched_idle. */
void sched_cut_done(struct sched_tenant *tenant, uint64_t lost_ns, uint64_t now);

/* How long it last took to put the entity on its device and to take it off again, together. */
void sched_note_hand_over(struct sched_entity *entity, uint64_t span_ns);

/* For what part of the last `span_ns` that a tenant with work was on the device some of it was unfinished, 0 to 1 and
 * above for several processes; as the tenant says. `streams`: see struct sched_entity. */
void sched_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint32_t streams, uint64_t now);

/* Grants, revokes and bypasses what is due. Returns when to call again, at the latest. */
uint64_t sched_run(uint64_t now);

/* `messages` stays the caller's and lives as long as the scheduler. Call once, before the first member is added. */
void sched_open(const struct sched_messages *messages);

/* For tests: the devices that are known. */
const struct sched_device *sched_devices(void);

#endif
