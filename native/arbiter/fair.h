/*
 * fair.h: the arithmetic of shares on one device: weights, lengths of turns, tokens, virtual time.
 *
 * One thread. `now` is in nanoseconds and does not go back; virtual time and tokens are nanoseconds of device time.
 */
#ifndef ARBITER_FAIR_H
#define ARBITER_FAIR_H

#include "sched_state.h"

/* Does the tenant of this entity take part now: has it members? */
bool fair_present(const struct sched_entity *entity);

/* Does the entity compete for turns: wants, holds, or held a moment ago? */
bool fair_active(const struct sched_entity *entity, uint64_t now);

/* Is a tenant of a higher priority present on the device? */
bool fair_outranked(const struct sched_entity *entity);

bool fair_is_hard(const struct sched_entity *entity);

/* Is a tenant under a limit that matters on this device, so that it is given in turns? */
bool fair_matters(const struct sched_device *device);

/* Brings a device's figures up to date: which entities are active, how long a round is; charges the holder, and adds the
 * tokens that were earned since the last call. What the functions below say is as of then. */
void fair_refresh(struct sched_device *device, uint64_t now);

/* Part of the device that the entity is entitled to, 0 to 1; `none` shares what the others leave. */
double fair_share(const struct sched_entity *entity);

/* Nanoseconds that the entity may hold the device at a time while others want it. */
double fair_quantum(const struct sched_entity *entity);

/* Most device time in flight for a holder of this device: what a revoked tenant still has to drain. */
uint64_t fair_window(const struct sched_device *device, uint64_t now);

/* Charges device time that was held; the debt stays within what SCHED_DEBT_WAIT_NS pays back. */
void fair_charge(struct sched_entity *entity, uint64_t used_ns, uint64_t now);

/* Takes back the charge for time of a turn in which nothing ran. */
void fair_refund(struct sched_entity *entity, uint64_t idle_ns);

/* How far the entity's virtual time is ahead of the hindmost of those that it competes with. */
double fair_ahead(const struct sched_entity *entity, uint64_t now);

/* Length of the turn that the entity gets now: its quantum, less what it had too much before, so that all
 * are even again at the end of each round. */
double fair_turn(const struct sched_entity *entity, uint64_t now);

/* A tenant whose last process had gone, or that is new. */
void fair_come_back(struct sched_entity *entity, uint64_t now);

/* An entity that comes back from idling does not keep time that it did not ask for. */
void fair_wake(struct sched_entity *entity, uint64_t now);

/* Tokens that a `hard` entity needs before its next turn: a full turn's worth, or half of one if others want
 * the device, so that it is not left idle for a tenant that overran a little. */
double fair_threshold(const struct sched_entity *entity, bool contended);

#endif
