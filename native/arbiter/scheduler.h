/*
 * scheduler.h: decides which tenant computes next. Pure: no I/O and no clock. The caller passes the time in
 * nanoseconds, and provides the functions that send messages to tenants (turns.c, or a test). One thread, no locks.
 * `now` never decreases between two calls.
 *
 * A tenant (a lease) has an entity on each of its devices, and members (its registered processes). At most one tenant
 * holds a managed device at a time, all its members together; a tenant that wants several devices gets them together. A
 * device is managed while a tenant on it has an effective limit: one `hard` tenant, or two tenants of which one has a
 * share.
 */
#ifndef ARBITER_SCHEDULER_H
#define ARBITER_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "sched_state.h"

/* Adds a tenant without members. Returns false if memory is short. */
bool sched_tenant_add(struct sched_tenant *tenant, uint32_t device_count, const char (*uuids)[VGPU_UUID_BYTES]);
void sched_tenant_remove(struct sched_tenant *tenant, uint64_t now);

/* Sets new limits of one entity, which take effect with the next sched_run. */
void sched_set_limits(struct sched_tenant *tenant, uint32_t ordinal, const struct sched_limits *limits);

void sched_member_add(struct sched_tenant *tenant, struct sched_member *member, uint64_t now);
void sched_member_remove(struct sched_member *member, uint64_t now);

/*
 * Records that a member has launches that wait for these devices (bits; bits beyond the lease are ignored, and 0 means
 * all of them).
 */
void sched_want(struct sched_member *member, uint32_t devices, uint64_t now);

/*
 * Records that a member gave its slice back. `turn` has the slice's number, the flag VGPU_TURN_MORE, and the idle time
 * at the slice's end. The member itself reports the idle time, so at most half of the slice is refunded at once. The
 * rest is refunded as far as the tenant then stays away. A message with the number of an earlier slice is ignored.
 */
void sched_done(struct sched_member *member, const struct vgpu_turn *turn, uint64_t now);

/*
 * Records that a member under the engine cut, in a slice or waiting for one, has no more work, and had none for
 * `idle_ns` (believed up to a bound).
 */
void sched_idle(struct sched_member *member, uint64_t idle_ns, uint64_t now);

/*
 * Records that all members under the engine cut are off the tenant's devices, as sched_messages.revoke requested. In
 * `lost_ns` of the slice none of their work ran. They want the next slice, until a member calls sched_idle.
 */
void sched_cut_done(struct sched_tenant *tenant, uint64_t lost_ns, uint64_t now);

/* Records how many calls took the entity off its device. The length of the rounds follows from this figure. */
void sched_note_hand_over(struct sched_entity *entity, uint32_t calls);

/*
 * Records the fraction of the last `span_ns` on the device in which the tenant's program waited in a call, as the
 * tenant reports it.
 */
void sched_note_waits(struct sched_entity *entity, double waiting, uint64_t span_ns, uint64_t now);

/*
 * Records the load that the tenant reports: the fraction of the last `span_ns` on the device in which some of its work
 * was unfinished, from 0 to 1, or above 1 for several processes. `streams`: see struct sched_entity.
 */
void sched_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint32_t streams, uint64_t now);

/* Makes all grants, revocations and bypasses that are due. Returns when to call this function again, at the latest. */
uint64_t sched_run(uint64_t now);

/*
 * Starts the scheduler. The caller keeps `messages`, which must live as long as the scheduler. Must be called once,
 * before the first member is added.
 */
void sched_open(const struct sched_messages *messages);

/* For tests: returns the known devices. */
const struct sched_device *sched_devices(void);

#endif
