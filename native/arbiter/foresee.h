/* foresee.h: hand-overs that are about to come. Waking a sleeper takes as long as a hand-over of the device
 * itself, so whoever comes next is told when (sched_say_soon), and the arbiter is awake then. */
#ifndef ARBITER_FORESEE_H
#define ARBITER_FORESEE_H

#include "scheduler.h"

/* After order_mark. Says what is new to those who come next; returns when to look again, at the latest. */
uint64_t foresee(const struct sched_device *devices, uint64_t now);

#endif
