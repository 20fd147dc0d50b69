/*
 * fair.h: the arithmetic of shares on one device: weights, lengths of time slices, tokens, virtual time.
 *
 * One thread. `now` is in nanoseconds and does not go back; virtual time and tokens are nanoseconds of device time.
 */
#ifndef ARBITER_FAIR_H
#define ARBITER_FAIR_H

#include "sched_state.h"

/* Is the tenant of this entity present: has it processes? */
bool fair_present(const struct sched_entity *entity);

/* Does the entity compete for time slices: does it want or hold one, or has it held one recently? */
bool fair_active(const struct sched_entity *entity, uint64_t now);

/* Is a tenant of a higher priority present on the device? */
bool fair_outranked(const struct sched_entity *entity);

bool fair_is_hard(const struct sched_entity *entity);

/* Does this device need time slices, because a tenant on it has an effective limit? */
bool fair_matters(const struct sched_device *device);

/*
 * Updates a device's figures: the active entities and the length of a round; charges the holder, and adds the tokens
 * earned since the last call. The functions below return values as of this update.
 */
void fair_refresh(struct sched_device *device, uint64_t now);

/* Part of the device that the entity is entitled to, 0 to 1; `none` shares what the others leave. */
double fair_share(const struct sched_entity *entity);

/* Longest time in nanoseconds that the entity may hold the device while others want it. */
double fair_quantum(const struct sched_entity *entity);

/* Most device time that a holder of this device may have in flight: after a revocation it must drain. */
uint64_t fair_window(const struct sched_device *device, uint64_t now);

/* Charges the time for which the device was held. The debt is limited to what SCHED_DEBT_WAIT_NS pays back. */
void fair_charge(struct sched_entity *entity, uint64_t used_ns, uint64_t now);

/* Takes back the charge for time of a turn in which nothing ran. */
void fair_refund(struct sched_entity *entity, uint64_t idle_ns);

/* The difference between the entity's virtual time and the smallest one among its competitors. */
double fair_ahead(const struct sched_entity *entity, uint64_t now);

/*
 * The length of the slice that the entity gets now: its quantum less its earlier overuse, so that all are even at the
 * end of each round.
 */
double fair_turn(const struct sched_entity *entity, uint64_t now);

/* Prepares the entity of a new tenant, or of one whose last process had ended. */
void fair_come_back(struct sched_entity *entity, uint64_t now);

/* Prepares an entity that was idle: it does not keep time that it did not use. */
void fair_wake(struct sched_entity *entity, uint64_t now);

/*
 * Tokens that a `hard` entity needs for its next slice: those of a full slice, or of half a slice if others want the
 * device, so that the device is not idle because a tenant overran a little.
 */
double fair_threshold(const struct sched_entity *entity, bool contended);

#endif
