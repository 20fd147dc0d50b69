/* order.h: in which order those who wait come to their turns. */
#ifndef ARBITER_ORDER_H
#define ARBITER_ORDER_H

#include "scheduler.h"
#include "together.h"

#define EACH_HELD(tenant, d)                              \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if (((tenant)->held >> d & 1) != 0)

#define EACH_WANTED(tenant, d)                            \
    for (uint32_t d = 0; d < (tenant)->device_count; d++) \
        if ((together_missing(tenant) >> d & 1) != 0)

/* 0: the tenant may have a turn now; else nanoseconds that its `hard` share makes it wait. */
uint64_t order_must_wait(const struct sched_tenant *tenant);

/* Has the waiting tenant had no turn for so long that its priority does not matter any more? */
bool order_starved(const struct sched_tenant *tenant, uint64_t now);

/* Marks on every managed device who of the waiting gets it next (device->next_place; NULL: nobody may). A
 * tenant is marked on all devices that it wants or on none: the first in the order always is, so that it
 * gets them together however busy they are; one behind it is if nobody before it wants a device of its. */
void order_mark(struct sched_tenant *tenants, struct sched_device *devices, uint64_t now);

#endif
