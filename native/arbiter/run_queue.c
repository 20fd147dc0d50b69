#include "run_queue.h"

#include <stddef.h>

#include "fair.h"
#include "gang.h"

/* Returns whether another tenant competes on a device that this tenant wants. */
static bool others_active(const struct sched_tenant *tenant)
{
    EACH_WANTED(tenant, d)
        if (tenant->entities[d]->device->active > 1)
            return true;
    return false;
}

uint64_t run_queue_must_wait(const struct sched_tenant *tenant)
{
    double longest = 0;
    bool contended = others_active(tenant);
    EACH_WANTED(tenant, d) {
        const struct sched_entity *entity = tenant->entities[d];
        /* a tenant that is on the device needs no hand-over to go on */
        bool on = tenant->held != 0 || entity->backfills;
        double least = on ? 0 : fair_threshold(entity, contended);
        double lacks = least - entity->tokens_ns;
        if (!fair_is_hard(entity) || lacks <= 0)
            continue;
        double wait = lacks * VGPU_SHARE_ALL / entity->limits.share;
        longest = wait > longest ? wait : longest;
    }
    return longest > 0 ? (uint64_t)longest + 1 : 0;
}

bool run_queue_starved(const struct sched_tenant *tenant, uint64_t now)
{
    return now - tenant->waits_since >= SCHED_STARVED_NS;
}

/*
 * Returns the rank of an entity. A starving tenant has the highest rank. Otherwise the rank is the priority; a positive
 * priority counts only while the entity's share is not used up.
 */
static int32_t rank(const struct sched_entity *entity, uint64_t now)
{
    if (run_queue_starved(entity->tenant, now))
        return INT32_MAX;
    return entity->tokens_ns > 0 || entity->limits.priority < 0 ? entity->limits.priority : 0;
}

/*
 * Sets a tenant's position in the queue. A tenant has one position for all of its devices: with one for each device,
 * two tenants of two devices could each be first on one device, and wait for each other. The position is the tenant's
 * largest lead in virtual time on any device over the competitor that is furthest behind there, in half rounds. For a
 * tenant that waits for one device, the lead is rounded down to whole half rounds, so tenants with equally many time
 * slices alternate, however long the slices are. The unit is half a round and not a whole one, because a tenant of
 * several devices that waits for one of them blocks the next tenant meanwhile.
 */
static void place_in_order(struct sched_tenant *tenant, uint64_t now)
{
    bool first = true;
    uint32_t missing = gang_missing(tenant);
    bool several = (missing & (missing - 1)) != 0;
    EACH_WANTED(tenant, d) {
        const struct sched_entity *entity = tenant->entities[d];
        double rounds = 2 * fair_ahead(entity, now) / entity->device->round_ns;
        double ahead = several ? rounds : (double)(uint64_t)rounds;
        if (first || rank(entity, now) < tenant->rank)
            tenant->rank = rank(entity, now);
        if (first || ahead > tenant->ahead)
            tenant->ahead = ahead;
        first = false;
    }
}

static bool before(const struct sched_tenant *a, const struct sched_tenant *b)
{
    if (a->rank != b->rank)
        return a->rank > b->rank;
    return a->ahead != b->ahead ? a->ahead < b->ahead : a->waits_since < b->waits_since;
}

static void mark(struct sched_tenant *tenant)
{
    EACH_WANTED(tenant, d)
        if (tenant->entities[d]->device->managed && tenant->entities[d]->device->next_entity != NULL)
            return;
    EACH_WANTED(tenant, d)
        if (tenant->entities[d]->device->managed)
            tenant->entities[d]->device->next_entity = tenant->entities[d];
}

void run_queue_mark(struct sched_tenant *tenants, struct sched_device *devices, uint64_t now)
{
    struct sched_tenant *waiting = NULL;
    for (struct sched_device *device = devices; device != NULL; device = device->next)
        device->next_entity = NULL;
    for (struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next) {
        if (gang_missing(tenant) == 0 || tenant->free_running || run_queue_must_wait(tenant) > 0)
            continue;
        place_in_order(tenant, now);
        struct sched_tenant **link = &waiting;
        while (*link != NULL && !before(tenant, *link))
            link = &(*link)->next_waiting;
        tenant->next_waiting = *link;
        *link = tenant;
    }
    for (; waiting != NULL; waiting = waiting->next_waiting)
        mark(waiting);
}
