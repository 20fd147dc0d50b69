/*
 * wakeup.h: predicts hand-overs of devices. Waking a sleeping thread takes as long as a hand-over itself, on virtual
 * machines above all, so the tenant that is next is told the expected time (sched_messages.soon), and the arbiter polls
 * instead of sleeping around it. Pure, as the scheduler is.
 */
#ifndef ARBITER_WAKEUP_H
#define ARBITER_WAKEUP_H

#include "sched_state.h"

/* Sends `soon` to members whose expected time is new. Precondition: run_queue_mark was called for `now`. Returns the
 * time of the next look, at the latest; SCHED_NEVER: none is needed. */
uint64_t wakeup_plan(const struct sched_device *devices, const struct sched_messages *messages, uint64_t now);

/* As of the last wakeup_plan: until this time a hand-over is expected and polling pays; 0: none is expected. */
uint64_t wakeup_alert_until(void);

#endif
