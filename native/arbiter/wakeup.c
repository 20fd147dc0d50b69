#include "wakeup.h"

#include <stddef.h>

#include "fair.h"
#include "gang.h"
#include "gap_predictor.h"

/* Around the moment when a device is expected to be given back. Waking a sleeper takes as long as a whole
 * hand-over otherwise, on virtual machines above all. */
#define ALERT_LEAD_NS 150000u
#define ALERT_FOR_NS 250000u
#define SOON_STEP_NS 100000u /* a smaller change of the moment is not worth a message */

static uint64_t alert_until;

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* When all devices that the tenant waits for are expected to be free; SCHED_NEVER: not known. */
static uint64_t expected(const struct sched_tenant *tenant)
{
    uint64_t at = 0;
    EACH_WANTED(tenant, d)
        for (const struct sched_entity *p = tenant->entities[d]->device->entities; p != NULL; p = p->next)
            if (p->holding && p->tenant->drains_at > at)
                at = p->tenant->drains_at;
    return at;
}

static void be_alert(uint64_t until)
{
    alert_until = alert_until > until ? alert_until : until;
}

/* A latency tenant is at work among others. When its next request comes, and when it is served, is predicted from its
 * former ones. Returns when to look out for it. */
static uint64_t look_out(const struct sched_device *device, uint64_t now)
{
    uint64_t from;
    uint64_t until;
    if (!device->managed || device->latency_tenant == NULL || device->active < 2 ||
        !fair_active(device->latency_tenant, now))
        return SCHED_NEVER;
    const struct sched_tenant *tenant = device->latency_tenant->tenant;
    bool foretold = device->latency_tenant->holding
                        ? gap_window(&tenant->busy, tenant->granted_at, &from, &until)
                        : tenant->wanted == 0 && gap_window(&tenant->idle, tenant->last_held, &from, &until);
    if (!foretold || now >= until)
        return SCHED_NEVER;
    if (now < from)
        return from;
    be_alert(until);
    return SCHED_NEVER;
}

/* When a latency tenant is expected to give its time slice back, long before its end; SCHED_NEVER: not known. */
static uint64_t latency_tenant_ends(const struct sched_device *device, uint64_t now)
{
    uint64_t from;
    uint64_t until;
    if (device->latency_tenant == NULL || !device->latency_tenant->holding)
        return SCHED_NEVER;
    const struct sched_tenant *tenant = device->latency_tenant->tenant;
    if (!gap_window(&tenant->busy, tenant->granted_at, &from, &until) || now >= until)
        return SCHED_NEVER;
    return from + (until - from) / 2;
}

static void say_soon(struct sched_tenant *tenant, uint64_t at, const struct sched_messages *messages, uint64_t now)
{
    if (tenant->soon_at != 0 && at < tenant->soon_at + SOON_STEP_NS && tenant->soon_at < at + SOON_STEP_NS)
        return;
    tenant->soon_at = at;
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_WAITING)
            messages->soon(m, at > now ? at - now : 0);
}

/* Tells the tenant that is next, and keeps the arbiter awake for the moment. Returns when to look again. */
static uint64_t look_ahead(const struct sched_device *device, const struct sched_messages *messages, uint64_t now)
{
    uint64_t again = look_out(device, now);
    if (!device->managed || device->busy == 0 || device->next_entity == NULL)
        return again;
    struct sched_tenant *tenant = device->next_entity->tenant;
    uint64_t at = earlier(expected(tenant), latency_tenant_ends(device, now));
    if (at == SCHED_NEVER)
        return again;
    say_soon(tenant, at, messages, now);
    if (now + ALERT_LEAD_NS < at)
        return earlier(again, at - ALERT_LEAD_NS);
    if (now < at + ALERT_FOR_NS)
        be_alert(at + ALERT_FOR_NS);
    return again;
}

uint64_t wakeup_alert_until(void)
{
    return alert_until;
}

uint64_t wakeup_plan(const struct sched_device *devices, const struct sched_messages *messages, uint64_t now)
{
    uint64_t next = SCHED_NEVER;
    alert_until = 0;
    for (const struct sched_device *device = devices; device != NULL; device = device->next)
        next = earlier(next, look_ahead(device, messages, now));
    return next;
}
