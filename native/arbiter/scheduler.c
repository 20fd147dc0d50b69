#include "scheduler.h"

#include <stdlib.h>
#include <string.h>

#include "backfill.h"
#include "fair.h"
#include "gang.h"
#include "invariant.h"
#include "run_queue.h"

#define PREEMPT_TOKENS_NS 300e3
#define IDLE_MAX_NS 2000000u /* longest idle time at the end of a slice that is believed to a process */
/* least length of a slice of a tenant that is ahead, before a tenant whose work has gaps interrupts it */
#define SLICE_LEAST_NS 3000000u
#define WINDOW_SHORT_NS 100000u
#define WINDOW_LENT_NS 4000000u /* device time that may be in flight while no tenant waits */

static struct sched_device *devices;
static struct sched_tenant *tenants;
static uint64_t last_turn;
static const struct sched_messages *messages;

void sched_open(const struct sched_messages *to)
{
    messages = to;
}

const struct sched_device *sched_devices(void)
{
    return devices;
}

/* --- tenants on devices */

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static struct sched_device *device_get(const char *uuid)
{
    struct sched_device *device = devices;
    while (device != NULL && strncmp(device->uuid, uuid, sizeof(device->uuid)) != 0)
        device = device->next;
    if (device != NULL || (device = calloc(1, sizeof(*device))) == NULL)
        return device;
    memcpy(device->uuid, uuid, sizeof(device->uuid));
    device->none_weight = 1;
    device->next = devices;
    devices = device;
    return device;
}

static void device_put(struct sched_device *device)
{
    struct sched_device **at = &devices;
    if (--device->users > 0)
        return;
    while (*at != device)
        at = &(*at)->next;
    *at = device->next;
    free(device);
}

static void remove_entities(struct sched_tenant *tenant)
{
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        device_put(tenant->entities[d]->device);
        free(tenant->entities[d]);
    }
}

/* Called when the tenant's first process registers. */
static void attach(struct sched_tenant *tenant, uint64_t now)
{
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        struct sched_entity *entity = tenant->entities[d];
        entity->next = entity->device->entities;
        entity->device->entities = entity;
    }
    tenant->next = tenants;
    tenants = tenant;
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        fair_refresh(tenant->entities[d]->device, now);
        fair_come_back(tenant->entities[d], now);
    }
}

/* Called when the tenant's last process has ended: the absent tenant must cost the others no time. */
static void detach(struct sched_tenant *tenant, uint64_t now)
{
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        struct sched_entity *entity = tenant->entities[d];
        struct sched_entity **link = &entity->device->entities;
        fair_refresh(entity->device, now);
        while (*link != entity)
            link = &(*link)->next;
        *link = entity->next;
        entity->backfills = false;
        entity->left_at = now;
    }
    struct sched_tenant **link = &tenants;
    while (*link != tenant)
        link = &(*link)->next;
    *link = tenant->next;
}

bool sched_tenant_add(struct sched_tenant *tenant, uint32_t device_count, const char (*uuids)[VGPU_UUID_BYTES])
{
    memset(tenant, 0, sizeof(*tenant));
    for (uint32_t d = 0; d < device_count; d++) {
        struct sched_entity *entity = calloc(1, sizeof(*entity));
        struct sched_device *device = entity != NULL ? device_get(uuids[d]) : NULL;
        if (device == NULL) {
            free(entity);
            remove_entities(tenant);
            tenant->device_count = 0;
            return false;
        }
        *entity = (struct sched_entity){.device = device, .tenant = tenant, .least_share = 1};
        entity->limits.share = VGPU_SHARE_ALL;
        device->users++;
        tenant->entities[d] = entity;
        tenant->device_count = d + 1;
    }
    return true;
}

void sched_set_limits(struct sched_tenant *tenant, uint32_t ordinal, const struct sched_limits *limits)
{
    struct sched_entity *entity = tenant->entities[ordinal];
    tenant->changed |= entity->limits.share != limits->share || entity->limits.policy != limits->policy;
    entity->limits = *limits;
}

void sched_member_add(struct sched_tenant *tenant, struct sched_member *member, uint64_t now)
{
    bool first = tenant->members == NULL;
    *member = (struct sched_member){.tenant = tenant, .next = tenant->members};
    tenant->members = member;
    if (first)
        attach(tenant, now);
}

static bool any(const struct sched_tenant *tenant, enum sched_member_state state)
{
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == state)
            return true;
    return false;
}

/* --- time slices */

/*
 * Returns the part of a slice's idle time that is refunded at its end. A process could report that it was idle and want
 * the device again at once, slice after slice, and would never be charged. So a report counts for at most half of the
 * slice; the rest counts only as far as the tenant then stays away (settle_unproven).
 */
static uint64_t believed_ns(struct sched_tenant *tenant, uint64_t held_ns)
{
    uint64_t idle_ns = earlier(tenant->idle_ns, held_ns);
    uint64_t most_ns = tenant->idle_measured ? held_ns : held_ns / 2;
    tenant->unproven = tenant->held;
    tenant->unproven_ns = idle_ns > most_ns ? idle_ns - most_ns : 0;
    return idle_ns - tenant->unproven_ns;
}

static void settle_unproven(struct sched_tenant *tenant, uint64_t now)
{
    uint64_t refund_ns = earlier(tenant->unproven_ns, now - tenant->last_held);
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((tenant->unproven >> d & 1) != 0 && tenant->entities[d]->device->managed)
            fair_refund(tenant->entities[d], refund_ns);
    tenant->unproven_ns = 0;
}

/* Returns what the entity was charged for each nanosecond of its slice: less than 1 if others ran beside it. */
static double charged_part(const struct sched_entity *entity, uint64_t held_ns)
{
    double part = held_ns > 0 ? (double)(entity->count.used_ns - entity->used_at_grant_ns) / (double)held_ns : 0;
    return part < 1 ? part : 1;
}

/* Ends a slice: takes the devices back from the tenant and charges it. */
static void turn_over(struct sched_tenant *tenant, uint64_t now)
{
    uint64_t held = now - tenant->granted_at;
    uint64_t refund_ns = believed_ns(tenant, held);
    double least = 1;
    EACH_HELD(tenant, d) {
        struct sched_entity *entity = tenant->entities[d];
        fair_refresh(entity->device, now);
        double part = charged_part(entity, held);
        least = part < least ? part : least;
        if (entity->device->managed)
            fair_refund(entity, (uint64_t)((double)refund_ns * part));
        entity->holding = false;
        entity->device->busy--;
        if (entity->device->managed && tenant->ends_at == SCHED_NEVER)
            entity->count.granted_ns += held;
        else if (entity->device->managed && now > tenant->ends_at)
            entity->count.overrun_ns += now - tenant->ends_at;
    }
    tenant->unproven_ns = (uint64_t)((double)tenant->unproven_ns * least);
    tenant->held = 0;
    tenant->idle_ns = 0;
    tenant->free_running = false;
    tenant->stopping = false;
    tenant->stuck = false;
    tenant->joined_until = 0;
    tenant->last_held = now;
    if (tenant->wanted != 0)
        tenant->waits_since = now;
}

static bool any_waits(const struct sched_tenant *tenant)
{
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_WAITING || (m->state == SCHED_OVERRUN && m->wants))
            return true;
    return false;
}

/* After a bypass: charges the tenant for its work that still ran beside others. */
static void settle_overrun(struct sched_tenant *tenant, uint64_t now)
{
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((tenant->overrun >> d & 1) != 0)
            fair_charge(tenant->entities[d], now - tenant->overrun_since, now);
    tenant->overrun = 0;
}

/*
 * Called when a process has changed its state or is removed. Ends the slice if no process of the tenant runs in it any
 * more.
 */
static void member_left(struct sched_tenant *tenant, uint64_t now)
{
    if (!any_waits(tenant))
        tenant->wanted = 0;
    if (tenant->wanted == 0 && tenant->idle_since == 0 && !any(tenant, SCHED_RUNNING))
        tenant->idle_since = now;
    if (!any(tenant, SCHED_OVERRUN))
        settle_overrun(tenant, now);
    if (!any(tenant, SCHED_RUNNING) && tenant->held != 0) {
        tenant->bypasses = 0;
        turn_over(tenant, now);
    }
}

void sched_member_remove(struct sched_member *member, uint64_t now)
{
    struct sched_tenant *tenant = member->tenant;
    struct sched_member **link = &tenant->members;
    while (*link != member)
        link = &(*link)->next;
    *link = member->next;
    member_left(tenant, now);
    if (tenant->members == NULL)
        detach(tenant, now);
}

void sched_tenant_remove(struct sched_tenant *tenant, uint64_t now)
{
    while (tenant->members != NULL)
        sched_member_remove(tenant->members, now);
    remove_entities(tenant);
}

static bool others_want(const struct sched_tenant *tenant, uint32_t bits)
{
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((bits >> d & 1) != 0)
            for (const struct sched_entity *p = tenant->entities[d]->device->entities; p != NULL; p = p->next)
                if (p->tenant != tenant)
                    EACH_WANTED(p->tenant, o)
                        if (p->tenant->entities[o] == p)
                            return true;
    return false;
}

static void say(struct sched_member *member, const struct sched_tenant *tenant, uint64_t now)
{
    struct vgpu_turn turn = {.number = tenant->turn, .devices = tenant->held, .window_ns = UINT64_MAX};
    uint64_t ends_at = tenant->stuck ? tenant->joined_until : tenant->ends_at;
    turn.length_ns = ends_at == SCHED_NEVER ? VGPU_TURN_OPEN_ENDED : ends_at > now ? ends_at - now : 0;
    bool endless = tenant->free_running &&
                   /* the slice of a tenant that is stopping has an end, which a process that joins it must keep */
                   !tenant->stopping;
    turn.flags = endless ? VGPU_TURN_FREE : tenant->open_ended ? 0 : VGPU_TURN_WATCH;
    EACH_HELD(tenant, d) {
        const struct sched_device *device = tenant->entities[d]->device;
        uint64_t window = fair_outranked(tenant->entities[d]) ? WINDOW_SHORT_NS
                          : tenant->open_ended                ? WINDOW_LENT_NS
                                                              : fair_window(device, now);
        turn.window_ns = window < turn.window_ns ? window : turn.window_ns;
    }
    member->state = SCHED_RUNNING;
    member->wants = false;
    member->turn = tenant->turn;
    messages->grant(member, &turn);
}

static void note_waiting(struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->wanted == 0) {
        tenant->waits_since = now;
        settle_unproven(tenant, now);
        for (uint32_t d = 0; d < tenant->device_count; d++) {
            fair_refresh(tenant->entities[d]->device, now);
            fair_wake(tenant->entities[d], now);
        }
    }
    backfill_note_work(tenant, now);
}

void sched_want(struct sched_member *member, uint32_t wanted, uint64_t now)
{
    struct sched_tenant *tenant = member->tenant;
    wanted &= (1u << tenant->device_count) - 1;
    if (wanted == 0)
        wanted = (1u << tenant->device_count) - 1; /* the process does not know its devices, so it gets all of them */
    member->wants = member->state == SCHED_RUNNING || member->state == SCHED_OVERRUN;
    member->devices = wanted;
    member->seen_at = now;
    if (member->state == SCHED_RUNNING)
        return; /* the process sends DONE later, with a flag if it has more work */
    if (tenant->held != 0 && !tenant->stopping && (wanted & ~tenant->held) == 0) {
        say(member, tenant, now); /* the process joins the slice of its tenant */
        return;
    }
    note_waiting(tenant, now);
    tenant->wanted |= gang_wanted(tenant, wanted, now);
    if (member->state == SCHED_IDLE)
        member->state = SCHED_WAITING;
}

/*
 * Handles the end of a process's part of a slice. `idle_ns` is the time of the slice in which nothing of the process
 * ran.
 */
static void end_part(struct sched_member *member, const struct vgpu_turn *turn, uint64_t idle_ns, bool measured,
                     uint64_t now)
{
    bool more = (turn->flags & VGPU_TURN_MORE) != 0;
    struct sched_tenant *tenant = member->tenant;
    if ((member->state != SCHED_RUNNING && member->state != SCHED_OVERRUN) || turn->number != member->turn)
        return;
    uint32_t used = turn->devices & ((1u << tenant->device_count) - 1);
    member->devices = used != 0 ? used : member->devices;
    member->seen_at = now;
    tenant->member_left_at = now;
    if (more) {
        if (tenant->wanted == 0)
            tenant->waits_since = now;
        tenant->wanted |= gang_wanted(tenant, tenant->held | tenant->overrun, now);
    }
    member->state = more ? SCHED_WAITING : SCHED_IDLE;
    member->wants = false;
    tenant->idle_ns = idle_ns;
    tenant->idle_measured = measured;
    member_left(tenant, now);
}

void sched_done(struct sched_member *member, const struct vgpu_turn *turn, uint64_t now)
{
    end_part(member, turn, turn->length_ns < IDLE_MAX_NS ? turn->length_ns : IDLE_MAX_NS, false, now);
}

void sched_idle(struct sched_member *member, uint64_t idle_ns, uint64_t now)
{
    struct vgpu_turn over = {.number = member->turn, .length_ns = idle_ns};
    if (member->state == SCHED_RUNNING || member->state == SCHED_OVERRUN) {
        sched_done(member, &over, now);
    } else if (member->state == SCHED_WAITING) {
        member->state = SCHED_IDLE;
        member_left(member->tenant, now);
    }
}

void sched_cut_done(struct sched_tenant *tenant, uint64_t lost_ns, uint64_t now)
{
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next) {
        struct vgpu_turn over = {.number = m->turn, .flags = VGPU_TURN_MORE};
        if (m->cut && (m->state == SCHED_RUNNING || m->state == SCHED_OVERRUN))
            end_part(m, &over, lost_ns, true, now);
    }
}

void sched_note_hand_over(struct sched_entity *entity, uint32_t calls)
{
    entity->hand_over_calls = calls;
}

void sched_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint32_t streams, uint64_t now)
{
    entity->streams = streams;
    backfill_note_load(entity, load, span_ns, now);
}

void sched_note_waits(struct sched_entity *entity, double waiting, uint64_t span_ns, uint64_t now)
{
    backfill_note_waits(entity, waiting, span_ns, now);
}

/* Returns whether all running processes of the tenant are under the engine cut. */
static bool is_cut(const struct sched_tenant *tenant)
{
    bool runs = false;
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next) {
        if (m->state == SCHED_RUNNING && !m->cut)
            return false;
        runs |= m->state == SCHED_RUNNING;
    }
    return runs;
}

/* --- decisions */

static void let_in(struct sched_tenant *tenant, uint64_t now)
{
    settle_overrun(tenant, now);
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if ((m->state == SCHED_WAITING || (m->state == SCHED_OVERRUN && m->wants)) && gang_may_join(m))
            say(m, tenant, now);
}

static void grant(struct sched_tenant *tenant, bool free_running, uint64_t now)
{
    double length = -1; /* -1: the slice has no end */
    double quantum = 0;
    tenant->held = tenant->wanted;
    tenant->aged = run_queue_starved(tenant, now);
    bool contended = others_want(tenant, tenant->held);
    EACH_HELD(tenant, d) {
        struct sched_entity *entity = tenant->entities[d];
        double most = fair_turn(entity, now);
        if (quantum == 0 || most < quantum)
            quantum = most;
        if (fair_is_hard(entity) && !free_running) {
            length = length < 0 || most < length ? most : length;
        }
        entity->holding = true;
        entity->backfills = false;
        entity->charged_until = now;
        entity->used_at_grant_ns = entity->count.used_ns;
        entity->device->busy++;
        entity->count.turns++;
        entity->count.waited_ns += now - tenant->waits_since;
    }
    if (length < 0 && contended && !free_running)
        length = quantum;
    tenant->free_running = free_running;
    tenant->open_ended = length < 0;
    tenant->stopping = false;
    tenant->turn = ++last_turn;
    tenant->granted_at = now;
    tenant->quantum_ns = (uint64_t)quantum;
    tenant->ends_at = length < 0 ? SCHED_NEVER : now + (uint64_t)length;
    tenant->changed = false;
    EACH_HELD(tenant, d)
        tenant->entities[d]->count.granted_ns += (uint64_t)(length < 0 ? 0 : length);
    tenant->wanted = 0;
    let_in(tenant, now);
}

/* Gives the tenant the devices that it waits for: in a new slice, or in the present one. */
static void give(struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->held == 0) {
        grant(tenant, false, now);
        return;
    }
    gang_extend(tenant, now);
    let_in(tenant, now);
}

static void stop(struct sched_tenant *tenant, uint64_t now)
{
    EACH_HELD(tenant, d) {
        uint64_t *granted = &tenant->entities[d]->count.granted_ns;
        uint64_t cut = tenant->ends_at != SCHED_NEVER && tenant->ends_at > now ? tenant->ends_at - now : 0;
        if (tenant->ends_at == SCHED_NEVER && tenant->entities[d]->device->managed)
            *granted += now - tenant->granted_at;
        *granted -= cut < *granted ? cut : *granted;
    }
    tenant->stopping = true;
    tenant->stays = false;
    tenant->open_ended = false;
    tenant->ends_at = now;
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_RUNNING)
            messages->revoke(m);
}

/*
 * Bypasses a tenant: the drain timeout has passed, so the next tenant is admitted beside it. Later slices do not wait
 * for its processes. A process whose launches wait at its gate still gets slices, because the running work may wait for
 * these launches.
 */
static void bypass(struct sched_tenant *tenant, uint64_t now)
{
    EACH_HELD(tenant, d)
        tenant->entities[d]->count.bypasses++;
    uint32_t bits = tenant->held;
    tenant->bypasses++;
    turn_over(tenant, now);
    tenant->overrun |= bits;
    tenant->overrun_since = now;
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next) {
        if (m->state == SCHED_RUNNING) {
            m->state = SCHED_OVERRUN;
            messages->revoke(m);
        }
        if (m->state == SCHED_OVERRUN && m->wants) {
            note_waiting(tenant, now);
            tenant->wanted |= bits;
        }
    }
}

static uint64_t drain_ends(const struct sched_tenant *tenant)
{
    uint64_t bound = tenant->bypasses > 0 ? SCHED_DRAIN_BOUND_NS / 4 : SCHED_DRAIN_BOUND_NS;
    return tenant->ends_at == SCHED_NEVER ? SCHED_NEVER : tenant->ends_at + bound;
}

static bool all_managed(const struct sched_tenant *tenant, uint32_t bits, bool as)
{
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((bits >> d & 1) != 0 && tenant->entities[d]->device->managed != as)
            return false;
    return true;
}

/* Grants the next tenant of the queue all devices that it wants, if they are free. Returns true if it was granted. */
static bool try_device(const struct sched_device *device, uint64_t now)
{
    if (device->next_entity == NULL)
        return false;
    struct sched_tenant *tenant = device->next_entity->tenant;
    EACH_WANTED(tenant, d) /* `device` is among them, and is managed (run_queue_mark) */
        if (tenant->entities[d]->device->managed && tenant->entities[d]->device->busy > 0)
            return false;
    give(tenant, now);
    return true;
}

static bool try_devices(uint64_t now)
{
    run_queue_mark(tenants, devices, now);
    for (const struct sched_device *device = devices; device != NULL; device = device->next)
        if (try_device(device, now))
            return true;
    return false;
}

static void say_again(struct sched_tenant *tenant, uint64_t now)
{
    for (struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state == SCHED_RUNNING)
            say(m, tenant, now);
}

/*
 * Called when another tenant has work: a slice without an end gets one, and must be given back when its tenant idles.
 */
static void set_end(struct sched_tenant *tenant, uint64_t now)
{
    uint64_t least = UINT64_MAX;
    EACH_HELD(tenant, d)
        least = earlier(least, (uint64_t)fair_quantum(tenant->entities[d]));
    tenant->quantum_ns = least;
    tenant->ends_at = tenant->granted_at + least;
    if (tenant->ends_at <= now) {
        stop(tenant, now);
        return;
    }
    tenant->open_ended = false;
    EACH_HELD(tenant, d)
        tenant->entities[d]->count.granted_ns += least;
    say_again(tenant, now);
}

/*
 * Did the entity get the device later than another? Two tenants may have been on a device before it was managed, each
 * in a slice on another device; the later one must leave.
 */
static bool came_second(const struct sched_entity *mine)
{
    for (const struct sched_entity *p = mine->device->entities; p != NULL; p = p->next)
        if (p->holding && !p->tenant->stopping && !p->tenant->free_running && p->tenant->turn < mine->tenant->turn)
            return mine->device->managed;
    return false;
}

/* Moves the end of a slice to an earlier time, if it has an end. */
static void shorten(struct sched_tenant *tenant, uint64_t to, uint64_t now)
{
    uint64_t ends_at = to > now ? to : now;
    if (tenant->ends_at == SCHED_NEVER || ends_at >= tenant->ends_at)
        return;
    EACH_HELD(tenant, d)
        tenant->entities[d]->count.granted_ns -= tenant->ends_at - ends_at;
    tenant->ends_at = ends_at;
}

/*
 * Ends or shortens the slice of a holder if its limits have changed, one of its devices became managed, or another
 * tenant needs one of its devices.
 */
static void make_room(struct sched_tenant *tenant, uint64_t now)
{
    uint32_t all = tenant->held | gang_missing(tenant);
    bool go = tenant->free_running ? !all_managed(tenant, all, false) : tenant->changed;
    bool wanted = false;
    EACH_HELD(tenant, d) {
        const struct sched_entity *mine = tenant->entities[d];
        const struct sched_entity *next = mine->device->managed ? mine->device->next_entity : NULL;
        go |= tenant->open_ended && !tenant->free_running && fair_is_hard(mine);
        go |= !tenant->free_running && came_second(mine);
        if (next == NULL || next == mine || tenant->free_running)
            continue;
        wanted = true;
        go |= !tenant->aged && next->limits.priority > mine->limits.priority && next->tokens_ns >= PREEMPT_TOKENS_NS;
        if (!tenant->aged && backfill_yields(mine, next, now))
            shorten(tenant, tenant->granted_at + SLICE_LEAST_NS, now);
    }
    if (go)
        stop(tenant, now);
    else if (wanted && tenant->open_ended)
        set_end(tenant, now);
}

/* Lets the holder run without pacing, because its devices need no time slices any more. */
static void set_free(struct sched_tenant *tenant, uint64_t now)
{
    tenant->free_running = true;
    say_again(tenant, now);
}

/*
 * After a change of limits: forgives the debt, because the debt of a long slice under a large share would take seconds
 * to pay under a small share.
 */
static void forgive(struct sched_tenant *tenant)
{
    for (uint32_t d = 0; d < tenant->device_count && tenant->changed; d++) {
        struct sched_entity *entity = tenant->entities[d];
        entity->spare_ns = (double)SCHED_DEBT_WAIT_NS; /* fair_refresh limits it */
        if (entity->tokens_ns < 0)
            entity->tokens_ns = 0;
    }
    tenant->changed = false;
}

/*
 * Lengthens a slice that is over, if the tenant would get the next one, too; otherwise returns false. Under the engine
 * cut a new slice would cost a hand-over.
 */
static bool lengthen(struct sched_tenant *tenant, uint64_t now)
{
    double length = -1;
    if (tenant->stopping || tenant->changed || gang_missing(tenant) != 0)
        return false;
    EACH_HELD(tenant, d) {
        const struct sched_entity *entity = tenant->entities[d];
        const struct sched_entity *next = entity->device->next_entity;
        double most = fair_turn(entity, now);
        if ((next != NULL && next != entity) || entity->tokens_ns < fair_threshold(entity, true))
            return false;
        length = length < 0 || most < length ? most : length;
    }
    tenant->ends_at = now + (uint64_t)length;
    EACH_HELD(tenant, d)
        tenant->entities[d]->count.granted_ns += (uint64_t)length;
    return true;
}

static void look_at_holder(struct sched_tenant *tenant, uint64_t now)
{
    gang_look(tenant, now);
    uint32_t missing = gang_missing(tenant);
    if (missing != 0 && all_managed(tenant, missing, false))
        give(tenant, now);
    if (missing == 0 && tenant->stuck)
        let_in(tenant, now);
    gang_release(tenant, now);
    if (tenant->open_ended && !tenant->free_running && all_managed(tenant, tenant->held, false))
        set_free(tenant, now);
    else if (!tenant->stopping)
        make_room(tenant, now);
    if (tenant->held != 0 && !tenant->stopping && now >= tenant->ends_at && is_cut(tenant) && !lengthen(tenant, now))
        stop(tenant, now);
}

static void look_at(struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->held != 0 && now >= drain_ends(tenant) && !is_cut(tenant))
        bypass(tenant, now);
    if (tenant->held != 0) {
        look_at_holder(tenant, now);
        return;
    }
    forgive(tenant);
    if (tenant->wanted != 0 && all_managed(tenant, tenant->wanted, false))
        grant(tenant, true, now);
}

/* Returns the time of this tenant's next deadline, if no message comes earlier. */
static uint64_t next_look(const struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->held == 0) {
        uint64_t wait = tenant->wanted != 0 ? run_queue_must_wait(tenant) : 0;
        return wait > 0 ? now + wait : SCHED_NEVER;
    }
    uint64_t bound = tenant->ends_at != SCHED_NEVER ? drain_ends(tenant) : SCHED_NEVER;
    if (is_cut(tenant))
        bound = tenant->stopping ? SCHED_NEVER : tenant->ends_at;
    return earlier(bound, gang_next_look(tenant, now));
}

/* In builds with VGPU_DEBUG: checks that the lists agree with the figures that are derived from them. */
static void check_invariants(void)
{
#ifdef VGPU_DEBUG
    for (const struct sched_device *device = devices; device != NULL; device = device->next) {
        uint32_t busy = 0;
        for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
            VGPU_ASSERT(p->device == device && p->tenant->members != NULL);
            busy += p->holding ? 1 : 0;
        }
        VGPU_ASSERT(device->busy == busy && device->users > 0);
    }
    for (const struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next) {
        for (uint32_t d = 0; d < tenant->device_count; d++)
            VGPU_ASSERT(tenant->entities[d]->holding == ((tenant->held >> d & 1) != 0));
        for (const struct sched_member *member = tenant->members; member != NULL; member = member->next)
            VGPU_ASSERT(member->tenant == tenant && (tenant->held != 0 || member->state != SCHED_RUNNING));
    }
#endif
}

uint64_t sched_run(uint64_t now)
{
    for (struct sched_device *device = devices; device != NULL; device = device->next) {
        fair_refresh(device, now);
        device->managed = fair_matters(device);
    }
    run_queue_mark(tenants, devices, now);
    for (struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next)
        look_at(tenant, now);
    while (try_devices(now))
        continue;
    for (struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next)
        if (tenant->held != 0 && tenant->open_ended &&
            /* the tenant may just have got the devices for which others wait */
            !tenant->stopping)
            make_room(tenant, now);
    for (struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next)
        backfill_look(tenant, now);
    uint64_t next = SCHED_NEVER;
    for (const struct sched_tenant *tenant = tenants; tenant != NULL; tenant = tenant->next)
        next = earlier(next, next_look(tenant, now));
    check_invariants();
    return next;
}
