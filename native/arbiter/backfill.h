/*
 * backfill.h: tenants that run in the turns of others, as the driver slices time among them. Two tenants that fill the
 * device have it in turns. A tenant whose work has gaps (its host is the limit, or requests come one by one) neither
 * needs the device to itself nor should wait for it: it backfills the turns of others, others backfill its own, and
 * each tenant on the device is charged its part of the time. A tenant that is ahead of the holder by its weight may
 * not, while the holder would use more than it gets. Only on devices whose tenants are cut (sched_device.cut).
 *
 * Whether there are gaps is a tenant's own word. A tenant that lies shares its turns, or has them alone: it is charged
 * for what it has either way.
 *
 * One thread. Times are nanoseconds.
 */
#ifndef ARBITER_BACKFILL_H
#define ARBITER_BACKFILL_H

#include "sched_state.h"

/* How busy the entity was in the last `span_ns`, see sched_note_load. */
void backfill_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint64_t now);

/* A tenant that may have been idle has work. */
void backfill_note_work(struct sched_tenant *tenant, uint64_t now);

/* Decides whether a tenant without a turn backfills; of a tenant whose turn is over, whether it does so in the next
 * turn; of an idle tenant, whether it is left on its devices. After all grants. */
void backfill_look(struct sched_tenant *tenant, uint64_t now);

#endif
