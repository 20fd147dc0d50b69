#include "gang.h"

#include <stddef.h>

#include "fair.h"

#define RECENT_NS 100000000u
/*
 * How long a granted device may stay unused by the tenant's processes: the ranks of one job ask for it within that
 * time.
 */
#define UNUSED_MAX_NS 5000000u
/*
 * time after which a slice that does not drain counts as stuck; most drains end earlier, because at most 2 ms of work
 * is in flight
 */
#define STUCK_AFTER_NS 3000000u
#define JOIN_NS 1000000u

uint32_t gang_wanted(const struct sched_tenant *tenant, uint32_t bits, uint64_t now)
{
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->seen_at != 0 && now - m->seen_at < RECENT_NS)
            bits |= m->devices;
    return bits;
}

uint32_t gang_missing(const struct sched_tenant *tenant)
{
    return tenant->stopping && !tenant->stuck ? 0 : tenant->wanted & ~tenant->held;
}

/* Returns the devices on which processes of the tenant run, as bits. */
static uint32_t in_use(const struct sched_tenant *tenant)
{
    uint32_t bits = 0;
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_RUNNING)
            bits |= m->devices;
    return bits;
}

/*
 * Does a process of the tenant wait for devices on which no process of the tenant runs, while others of its processes
 * run elsewhere?
 */
static bool any_held_back(const struct sched_tenant *tenant)
{
    uint32_t bits = in_use(tenant);
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_WAITING && (m->devices & bits) == 0)
            return bits != 0;
    return false;
}

/* Returns the time at which the tenant becomes stuck, if it is still running then. */
static uint64_t stuck_at(const struct sched_tenant *tenant)
{
    uint64_t over = tenant->joined_until > tenant->ends_at ? tenant->joined_until : tenant->ends_at;
    return tenant->ends_at == SCHED_NEVER ? SCHED_NEVER : over + STUCK_AFTER_NS;
}

void gang_look(struct sched_tenant *tenant, uint64_t now)
{
    if (now >= stuck_at(tenant) && any_held_back(tenant))
        tenant->joined_until = now + JOIN_NS;
    tenant->stuck = tenant->joined_until > now;
}

bool gang_may_join(const struct sched_member *member)
{
    return !member->tenant->stuck || (member->devices & in_use(member->tenant)) == 0;
}

void gang_extend(struct sched_tenant *tenant, uint64_t now)
{
    EACH_WANTED(tenant, d) {
        struct sched_entity *entity = tenant->entities[d];
        entity->holding = true;
        entity->charged_until = now;
        entity->used_at_grant_ns = entity->count.used_ns;
        entity->device->busy++;
        entity->count.turns++;
        entity->count.waited_ns += now - tenant->waits_since;
        if (tenant->ends_at != SCHED_NEVER && tenant->ends_at > now)
            entity->count.granted_ns += tenant->ends_at - now;
    }
    tenant->held |= tenant->wanted;
    tenant->wanted = 0;
}

/* Returns the devices that the tenant holds, but that none of its running processes is known to use, as bits. */
static uint32_t unused(const struct sched_tenant *tenant)
{
    uint32_t bits = tenant->held;
    if (tenant->free_running)
        return 0;
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_RUNNING)
            bits &= ~m->devices;
    return bits;
}

/* Would the next tenant in the run queue have all devices for which it waits, if the devices `bits` became free? */
static bool is_usable(const struct sched_entity *next, uint32_t bits, const struct sched_tenant *holder)
{
    if (next == NULL || next->tenant == holder)
        return false;
    EACH_WANTED(next->tenant, d) {
        const struct sched_device *device = next->tenant->entities[d]->device;
        bool ours = false;
        EACH_HELD(holder, h)
            ours |= (bits >> h & 1) != 0 && holder->entities[h]->device == device;
        if (device->managed && device->busy > (ours ? 1 : 0))
            return false;
    }
    return true;
}

static uint64_t since(const struct sched_tenant *tenant)
{
    return tenant->granted_at > tenant->member_left_at ? tenant->granted_at : tenant->member_left_at;
}

void gang_release(struct sched_tenant *tenant, uint64_t now)
{
    uint32_t bits = unused(tenant);
    if (bits == 0 || bits == tenant->held || now < since(tenant) + UNUSED_MAX_NS)
        return;
    EACH_HELD(tenant, d) {
        struct sched_entity *entity = tenant->entities[d];
        if ((bits >> d & 1) == 0 || !is_usable(entity->device->next_entity, bits, tenant))
            continue;
        fair_refresh(entity->device, now);
        entity->holding = false;
        entity->device->busy--;
        tenant->held &= ~(1u << d);
    }
}

uint64_t gang_next_look(const struct sched_tenant *tenant, uint64_t now)
{
    uint64_t at = since(tenant) + UNUSED_MAX_NS;
    uint32_t bits = unused(tenant);
    uint64_t next = bits != 0 && bits != tenant->held && now < at ? at : SCHED_NEVER;
    if (tenant->ends_at == SCHED_NEVER || tenant->wanted == 0)
        return next;
    uint64_t stuck = stuck_at(tenant);
    return now < stuck && stuck < next ? stuck : next;
}
