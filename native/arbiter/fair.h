/*
 * fair.h: the arithmetic of shares on one device: weights, lengths of time slices, tokens, virtual time.
 *
 * Only one thread may call it. `now` is in nanoseconds and never decreases. Tokens are nanoseconds of device time.
 * Virtual time is device time in nanoseconds, divided by the share.
 */
#ifndef ARBITER_FAIR_H
#define ARBITER_FAIR_H

#include "sched_state.h"

/* Returns whether a tenant of a higher priority has processes on the entity's device. */
bool fair_outranked(const struct sched_entity *entity);

bool fair_is_hard(const struct sched_entity *entity);

/* Returns whether this device needs time slices, because a tenant on it has an effective limit. */
bool fair_matters(const struct sched_device *device);

/*
 * Updates a device's figures: the active entities and the length of a round. If the device has time slices, charges the
 * entities that are on it. Adds the tokens earned since the last call. The functions below return values as of this
 * update.
 */
void fair_refresh(struct sched_device *device, uint64_t now);

/*
 * Returns the part of the device to which the entity is entitled, 0 to 1. Entities with policy `none` divide what the
 * others leave, and each has at least the weight NONE_SHARE_MIN.
 */
double fair_share(const struct sched_entity *entity);

/* Returns the maximum time in nanoseconds that the entity may hold the device while other tenants want it. */
double fair_quantum(const struct sched_entity *entity);

/*
 * Returns the maximum of device time that a holder may have in flight, because after a revocation this work must drain.
 */
uint64_t fair_window(const struct sched_device *device, uint64_t now);

/*
 * Charges the time for which the entity held the device. The debt is limited to what SCHED_DEBT_WAIT_NS of waiting pays
 * back.
 */
void fair_charge(struct sched_entity *entity, uint64_t used_ns, uint64_t now);

/*
 * Returns the part of the time that the entity is charged, 0 to 1, while it runs beside the tenants that are on the
 * device now.
 */
double fair_part_beside(const struct sched_entity *entity);

/* Takes back the charge for the time of a slice in which nothing ran. */
void fair_refund(struct sched_entity *entity, uint64_t idle_ns);

/*
 * Returns how far the entity's virtual time is ahead of the smallest among its competitors; 0 if it is not ahead or has
 * none.
 */
double fair_ahead(const struct sched_entity *entity, uint64_t now);

/*
 * Returns the length of the slice that the entity gets now: its quantum, less up to half of it for earlier overuse, so
 * that the entities become even. An entity that is ahead by more than half a round gets the whole quantum, because the
 * others cannot use the time.
 */
double fair_turn(const struct sched_entity *entity, uint64_t now);

/* Prepares the entity of a new tenant, or of one whose last process had ended. */
void fair_come_back(struct sched_entity *entity, uint64_t now);

/*
 * Prepares an entity that was idle: of the time that it did not use, it keeps a credit of at most 40 ms of virtual
 * time.
 */
void fair_wake(struct sched_entity *entity, uint64_t now);

/*
 * Returns the tokens that a `hard` entity needs for its next slice: those of a full slice, or of half a slice if others
 * want the device. So the device is not left idle because a tenant overran a little.
 */
double fair_threshold(const struct sched_entity *entity, bool contended);

#endif
