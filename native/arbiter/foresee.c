#include "foresee.h"

#include <stddef.h>

#include "fair.h"
#include "order.h"

/* Around the moment when a device is expected to be given back. Waking a sleeper takes as long as a whole
 * hand-over otherwise, on virtual machines above all. */
#define ALERT_LEAD_NS 150000u
#define ALERT_FOR_NS 250000u
#define WISHER_ALERT_NS 10000000u
#define SOON_STEP_NS 100000u /* a smaller change of the moment is not worth a message */

static uint64_t alert_until;

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* When everything that the tenant waits for is expected to be free; SCHED_NEVER: nobody knows. */
static uint64_t expected(const struct sched_tenant *tenant)
{
    uint64_t at = 0;
    EACH_WANTED(tenant, d)
        for (const struct sched_place *p = tenant->places[d]->device->places; p != NULL; p = p->next)
            if (p->holding && p->tenant->drains_at > at)
                at = p->tenant->drains_at;
    return at;
}

/* Somebody whose turns are short is at work among others: its requests come at any time. */
static bool always_alert(const struct sched_device *device, uint64_t now)
{
    return device->managed && device->wisher != NULL && device->active > 1 && fair_active(device->wisher, now);
}

static void say_soon(struct sched_tenant *tenant, uint64_t at, uint64_t now)
{
    if (tenant->soon_at != 0 && at < tenant->soon_at + SOON_STEP_NS && tenant->soon_at < at + SOON_STEP_NS)
        return;
    tenant->soon_at = at;
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_WAITING)
            sched_say_soon(m, at > now ? at - now : 0);
}

static void be_alert(uint64_t until)
{
    alert_until = alert_until > until ? alert_until : until;
}

/* Tells who comes next, and is awake itself when the moment comes. Returns when to look again. */
static uint64_t look_ahead(const struct sched_device *device, uint64_t now)
{
    bool always = always_alert(device, now);
    uint64_t again = always ? now + WISHER_ALERT_NS : SCHED_NEVER;
    if (always)
        be_alert(now + 2 * WISHER_ALERT_NS);
    if (!device->managed || device->busy == 0 || device->next_place == NULL)
        return again;
    struct sched_tenant *tenant = device->next_place->tenant;
    uint64_t at = always && device->wisher->holding ? now : expected(tenant);
    if (at == SCHED_NEVER)
        return again;
    say_soon(tenant, at, now);
    if (now + ALERT_LEAD_NS < at)
        return earlier(again, at - ALERT_LEAD_NS);
    if (now < at + ALERT_FOR_NS)
        be_alert(at + ALERT_FOR_NS);
    return again;
}

uint64_t sched_alert_until(void)
{
    return alert_until;
}

uint64_t foresee(const struct sched_device *devices, uint64_t now)
{
    uint64_t next = SCHED_NEVER;
    alert_until = 0;
    for (const struct sched_device *device = devices; device != NULL; device = device->next)
        next = earlier(next, look_ahead(device, now));
    return next;
}
