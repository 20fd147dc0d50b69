/*
 * backfill.h: lets tenants run in the time slices of others; the driver then divides the time among them. Two tenants
 * that fill the device have exclusive slices. If a tenant's work has gaps (its host is the limit, or requests come one
 * by one), it backfills the slices of others, others backfill its slices, and each tenant is charged for its part of
 * the time. So that a tenant beside others gets about its share, one whose part of the time is larger than its share
 * may not backfill while its virtual time is far ahead of the holder's, and under a hard share it may only while it has
 * tokens. A tenant that is charged for its part of the time gets more than that part in the gaps of others. If it gets
 * more than its hard share in this way, it has exclusive slices for 15 to 32 s (sched_entity.apart). One that gets less
 * than half of what it is charged beside others has exclusive slices for 8 s (sched_entity.crowded_until). Tenants run
 * beside each other in this way only on devices with the engine cut (sched_device.cut).
 *
 * A tenant itself reports its gaps, and may lie. It is charged for its part of the time with shared and with exclusive
 * slices, so it takes no time from others: one that reports false gaps makes the others' slices exclusive, in which they
 * and it have their shares. The most that a `hard` tenant can gain is time that others leave: if it reports false gaps
 * of its own, what it gets in the gaps of others does not count. A tenant that reports false waits gets exclusive slices.
 *
 * Only one thread may call these functions. Times are nanoseconds.
 */
#ifndef ARBITER_BACKFILL_H
#define ARBITER_BACKFILL_H

#include "sched_state.h"

/* Records the tenant's load on the entity's device in the last `span_ns`; see sched_note_load. */
void backfill_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint64_t now);

/* Records how much the tenant's program waited in the last `span_ns`; see sched_note_waits. */
void backfill_note_waits(struct sched_entity *entity, double waiting, uint64_t span_ns, uint64_t now);

/* Records that a tenant which may have been idle has work. */
void backfill_note_work(struct sched_tenant *tenant, uint64_t now);

/*
 * Must the holder give its slice to the next tenant? It must if the holder is far ahead in virtual time, the next
 * tenant's work has gaps, and the next tenant's priority is not lower than the holder's; only with the engine cut. A
 * tenant whose work has gaps cannot make up later for the time that it waits. One that has exclusive slices because it
 * gets too little beside others waits for them, so that a false report of waits costs the others no hand-overs.
 */
bool backfill_yields(const struct sched_entity *holder, const struct sched_entity *next, uint64_t now);

/*
 * Decides, after all grants, for one tenant: if it has no slice, whether it backfills; if its slice is over, whether it
 * stays in the next slice; if it is idle, whether it stays on its devices.
 */
void backfill_look(struct sched_tenant *tenant, uint64_t now);

#endif
