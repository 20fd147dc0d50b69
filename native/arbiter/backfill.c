#include "backfill.h"

#include <stddef.h>

#include "fair.h"
#include "gang.h"
#include "run_queue.h"

/* load (part of the time with unfinished work) below which a tenant's work counts as having gaps */
#define LIGHT_LOAD 0.75
#define PRESSED_LOAD 0.95 /* load beside other tenants from which on a tenant would use more time if it got more */
#define LIGHT_NS 4000000000ull
#define RETRY_NS 1000000000ull
#define RETRY_MAX_NS 4000000000ull
/*
 * observed time, in nanoseconds, before a tenant is judged to have gaps or not; a single pause counts as at most
 * GAP_MAX_NS, so that it cannot decide the verdict
 */
#define JUDGED_NS 100e6
/* longest gap that counts: a longer idle time says nothing about the tenant's present work */
#define GAP_MAX_NS 5000000u
#define PRESSED_NS 50000000u
#define AHEAD_ROUNDS 0.25
/*
 * part of its share that a tenant must leave unused before the rest counts as gaps of its work: hand-overs, which no
 * tenant is charged for, take up to 3 % of a tenant's share
 */
#define UNUSED_PART 0.1
/*
 * part of a tenant's time beside others that does not count as gaps of its work: the driver's switches take as much of a
 * shared device, so the others get nothing of it
 */
#define SWITCHES_PART 0.06
/* the most by which gaps below this part reduce those that are counted later */
#define GAP_CREDIT_NS 1e6
/*
 * observed time after which a program's waits alone and beside others are compared, the part of what its tenant is
 * charged beside others that it must get there, and the time for which a tenant that gets less runs beside no other
 */
#define COMPARED_NS 200e6
#define CROWDED_PART 0.5
#define CROWDED_NS 8000000000ull
#define CHANCE_NS 10e6 /* by how much 200 samples may be wrong by chance: some programs wait in nearly all of them */
#define ABOUT 1.01     /* tolerance for rounded shares: three tenants with a third each have 33.33 % */

static const struct sched_entity *holder_of(const struct sched_device *device)
{
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if (p->holding)
            return p;
    return NULL;
}

static bool is_shared(const struct sched_device *device)
{
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if (p->backfills)
            return true;
    return false;
}

static bool is_light(const struct sched_entity *entity, uint64_t now)
{
    return now < entity->light_until;
}

/*
 * Judges whether a tenant's work has gaps, after JUDGED_NS of observation, because a moment says little. A tenant that
 * shows no gaps beside other tenants may still have gaps when it runs alone, so no verdict follows then. `at` is the
 * end of the observed work: the verdict on work before a long idle time does not hold for the work after it.
 */
static void judge(struct sched_entity *entity, double busy_ns, double gaps_ns, uint64_t at)
{
    bool shared = is_shared(entity->device);
    entity->busy_ns += busy_ns;
    entity->gaps_ns += gaps_ns;
    if (entity->busy_ns + entity->gaps_ns < JUDGED_NS)
        return;
    if (entity->busy_ns < LIGHT_LOAD * (entity->busy_ns + entity->gaps_ns)) {
        entity->light_until = at + LIGHT_NS;
    } else if (!shared) {
        entity->light_until = at;
        entity->retry_ns = RETRY_NS;
    }
    entity->busy_ns = 0;
    entity->gaps_ns = 0;
}

/*
 * If no tenant on a shared device seems to have gaps, gives them exclusive slices on trial, in which they are judged
 * again. The next trial comes after twice the time, up to RETRY_MAX_NS.
 */
static void try_turns(struct sched_device *device, uint64_t now)
{
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if ((p->holding || p->backfills) && (p->pressed_ns < JUDGED_NS || now < p->retry_at))
            return;
    for (struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if (p->holding || p->backfills) {
            p->light_until = now;
            p->retry_ns = p->retry_ns == 0 ? RETRY_NS : p->retry_ns < RETRY_MAX_NS ? 2 * p->retry_ns : RETRY_MAX_NS;
            p->retry_at = now + p->retry_ns;
        }
}

/*
 * Counts time in which an entity on a shared device had no work as used by the tenants beside it that would use more
 * time if they got more. A report covers a few samples only, in which gaps are above or below their mean by chance:
 * what is below offsets what is above, up to GAP_CREDIT_NS.
 */
static void count_gap(struct sched_entity *entity, double gap_ns, uint64_t now)
{
    double pressed = 0;
    entity->gap_ns += gap_ns;
    if (entity->gap_ns < -GAP_CREDIT_NS)
        entity->gap_ns = -GAP_CREDIT_NS;
    if (entity->gap_ns <= 0)
        return;
    for (const struct sched_entity *p = entity->device->entities; p != NULL; p = p->next)
        pressed += p != entity && (p->holding || p->backfills) && now < p->pressed_until;
    for (struct sched_entity *p = entity->device->entities; p != NULL; p = p->next)
        if (p != entity && (p->holding || p->backfills) && now < p->pressed_until)
            p->spare_ns -= entity->gap_ns * fair_part_beside(entity) / pressed;
    entity->gap_ns = 0;
}

/*
 * Compares how a program waits beside others and alone. The rest of a step, its host's part, takes as long there as here,
 * so beside others the program's speed is the host's part of the time there, divided by its part alone. The driver gives
 * the device to each process for some milliseconds: a program that waits for each of its short kernels gets one of them
 * in that time, and is charged as much as a busy tenant. Exclusive slices give both their shares. Where the part alone
 * is not known, they are a trial in which it is measured.
 */
static void compare(struct sched_entity *entity, uint64_t now)
{
    struct sched_waits *alone = &entity->alone;
    struct sched_waits *beside = &entity->beside;
    double alone_ns = alone->waiting_ns + alone->host_ns;
    double beside_ns = beside->waiting_ns + beside->host_ns;
    if (alone_ns >= COMPARED_NS) {
        entity->alone_known = true;
        entity->host_alone = alone->host_ns / alone_ns;
        *alone = (struct sched_waits){0};
    }
    if (beside_ns < COMPARED_NS)
        return;
    double least = CROWDED_PART * fair_part_beside(entity) * (entity->alone_known ? entity->host_alone : 1);
    if (beside->host_ns + CHANCE_NS < least * beside_ns && entity->limits.policy != VGPU_SHARE_NONE)
        entity->crowded_until = now + (entity->alone_known ? CROWDED_NS : RETRY_NS);
    *beside = (struct sched_waits){0};
}

void backfill_note_waits(struct sched_entity *entity, double waiting, uint64_t span_ns, uint64_t now)
{
    struct sched_waits *waits = is_shared(entity->device) ? &entity->beside : &entity->alone;
    waits->waiting_ns += waiting * (double)span_ns;
    waits->host_ns += (1 - waiting) * (double)span_ns;
    compare(entity, now);
}

void backfill_note_load(struct sched_entity *entity, double load, uint64_t span_ns, uint64_t now)
{
    double busy = load < 1 ? load : 1;
    bool pressed = load >= PRESSED_LOAD;
    entity->pressed_until = pressed ? now + PRESSED_NS : now;
    entity->pressed_ns = pressed ? entity->pressed_ns + (double)span_ns : 0;
    /*
     * beside other tenants, the tenant's work takes longer: its busy time counts multiplied by its part of the device
     */
    judge(entity, busy * (double)span_ns * fair_part_beside(entity), (1 - busy) * (double)span_ns, now);
    if (!is_shared(entity->device))
        return;
    count_gap(entity, (1 - busy - SWITCHES_PART) * (double)span_ns, now);
    try_turns(entity->device, now);
}

/*
 * Returns the time that counts as the tenant's gaps: its last pause or, if that is more, the part of its share that it
 * did not use. A tenant with too little work for its share may be busy whenever it has the device, because its work
 * collects while it waits. Its share may have been smaller before (it was changed, or another tenant competed): the
 * smallest share counts for the whole time.
 */
static double unused_ns(const struct sched_entity *entity, double used_ns, double gap_ns, uint64_t now)
{
    if (now < entity->light_until) /* the tenant runs beside others, so it uses less than its share in any case */
        return gap_ns;
    double worked_ns = (double)(entity->tenant->idle_since - entity->tenant->work_since);
    double share_ns = entity->least_share * (worked_ns + gap_ns);
    double rest_ns = share_ns - used_ns;
    return rest_ns > gap_ns && rest_ns > UNUSED_PART * share_ns ? rest_ns : gap_ns;
}

void backfill_note_work(struct sched_tenant *tenant, uint64_t now)
{
    double gap = now - tenant->idle_since < GAP_MAX_NS ? (double)(now - tenant->idle_since) : GAP_MAX_NS;
    for (uint32_t d = 0; d < tenant->device_count && tenant->idle_since != 0; d++) {
        struct sched_entity *entity = tenant->entities[d];
        double used = (double)(entity->count.used_ns - entity->used_before_ns);
        /* only the gap is judged here: the busy time was judged when the process reported its load */
        judge(entity, 0, unused_ns(entity, used, gap, now), tenant->idle_since);
        entity->used_before_ns = entity->count.used_ns;
        entity->least_share = 1;
        if (now - tenant->idle_since >= LIGHT_NS)
            entity->busy_ns = entity->gaps_ns = 0; /* too old for a verdict */
    }
    if (tenant->idle_since != 0 || tenant->work_since == 0)
        tenant->work_since = now;
    tenant->idle_since = 0;
}

/* Returns whether the holder would use more time than it gets beside other tenants. */
static bool is_pressed(const struct sched_entity *holder, uint64_t now)
{
    return !is_light(holder, now) || now < holder->pressed_until;
}

/* Does the tenant, while it runs beside the others that are on the device, get no more than its share? */
static bool within_share(const struct sched_entity *entity)
{
    return fair_part_beside(entity) <= fair_share(entity) * ABOUT;
}

/*
 * Is `entity` so far ahead of `other` that it may not run beside it? A tenant that gets no more than its share there is
 * not too far ahead. Under a hard share the tenant's tokens decide instead.
 */
static bool too_far_ahead(const struct sched_entity *entity, const struct sched_entity *other)
{
    double ahead = entity->vtime_ns - other->vtime_ns;
    return !fair_is_hard(entity) && !within_share(entity) && ahead >= AHEAD_ROUNDS * entity->device->round_ns;
}

/*
 * Does the tenant, which may have several devices, have a `hard` share of a device for which no other tenant competes?
 * On that device its tokens pay for the whole time. If the tenant shares another device meanwhile, its kernels there
 * are slower, and its kernels on the first device wait for them. The wait would use up the hard share.
 */
static bool loses_by_sharing(const struct sched_tenant *tenant)
{
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        const struct sched_entity *entity = tenant->entities[d];
        if (((tenant->held | tenant->wanted) >> d & 1) != 0 && fair_is_hard(entity) && entity->device->active < 2)
            return true;
    }
    return false;
}

static bool lets(const struct sched_entity *holder, const struct sched_entity *guest, uint64_t now)
{
    if (holder->apart || guest->apart || now < holder->crowded_until || now < guest->crowded_until)
        return false;
    if (loses_by_sharing(holder->tenant) || loses_by_sharing(guest->tenant))
        return false;
    if (holder->limits.priority > guest->limits.priority && holder->tokens_ns > 0)
        return false;
    return (is_light(holder, now) || is_light(guest, now)) && !too_far_ahead(guest, holder);
}

bool backfill_yields(const struct sched_entity *holder, const struct sched_entity *next, uint64_t now)
{
    return holder->device->cut && holder->limits.priority <= next->limits.priority && is_light(next, now) &&
           now >= next->crowded_until && too_far_ahead(holder, next);
}

static bool all_cut(const struct sched_tenant *tenant)
{
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        if (m->state != SCHED_IDLE && !m->cut)
            return false;
    return true;
}

/*
 * Has the tenant tokens for backfilling? Under a hard share, backfilling begins like a time slice and ends when the
 * share's tokens are used up. A tenant that gets no more than its share beside the others needs none: its tokens do not
 * become fewer meanwhile.
 */
static bool affords(const struct sched_tenant *tenant)
{
    bool backfills = false;
    bool empty = false;
    bool earns = true;
    EACH_WANTED(tenant, d) {
        const struct sched_entity *entity = tenant->entities[d];
        backfills |= entity->backfills;
        empty |= fair_is_hard(entity) && entity->tokens_ns <= 0;
        earns &= !fair_is_hard(entity) || within_share(entity);
    }
    return earns || (backfills ? !empty : run_queue_must_wait(tenant) == 0);
}

/*
 * May the tenant run beside the holders of all devices for which it waits? A device without a holder needs no check,
 * because the tenant hinders no other tenant there; at least one of the devices must have a holder.
 */
static bool may_backfill(const struct sched_tenant *tenant, uint64_t now)
{
    bool beside = false;
    if (tenant->held != 0 || tenant->wanted == 0 || tenant->changed || !all_cut(tenant) || !affords(tenant))
        return false;
    EACH_WANTED(tenant, d) {
        const struct sched_entity *mine = tenant->entities[d];
        const struct sched_entity *holder = holder_of(mine->device);
        if (!mine->device->cut || (holder != NULL && (holder->tenant->free_running || !lets(holder, mine, now))))
            return false;
        beside |= mine->device->managed && holder != NULL;
    }
    return beside;
}

/*
 * May an idle tenant stay on its devices? It may if the holders of these devices would use no more time than they get;
 * the tenant's next work then starts at once. Under a hard share it may not, because only the tenant itself reports
 * that it is idle.
 */
static bool may_linger(const struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->held != 0 || tenant->wanted != 0 || tenant->members == NULL)
        return false;
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        const struct sched_entity *mine = tenant->entities[d];
        const struct sched_entity *holder = holder_of(mine->device);
        if (!mine->device->cut || fair_is_hard(mine) || (holder != NULL && is_pressed(holder, now)))
            return false;
    }
    return true;
}

/* May the tenant, after the end of its time slice, backfill the next holder's slice on all of its devices? */
static bool stays_on(const struct sched_tenant *tenant, uint64_t now)
{
    bool beside = false;
    if (!all_cut(tenant) || tenant->changed)
        return false;
    EACH_HELD(tenant, d) {
        const struct sched_entity *mine = tenant->entities[d];
        const struct sched_entity *next = mine->device->managed ? mine->device->next_entity : NULL;
        bool is_free = next == NULL || next == mine;
        if (!mine->device->cut || (!is_free && !lets(next, mine, now)) || (fair_is_hard(mine) && mine->tokens_ns <= 0))
            return false;
        beside |= !is_free;
    }
    return beside;
}

/* Limits how far a backfilling tenant is ahead in virtual time, if the holder could not use the time. */
static void forgive(struct sched_entity *guest, uint64_t now)
{
    const struct sched_entity *holder = holder_of(guest->device);
    double most = holder != NULL ? holder->vtime_ns + guest->device->round_ns : guest->vtime_ns;
    if (guest->vtime_ns > most && !is_pressed(holder, now))
        guest->vtime_ns = most;
}

void backfill_look(struct sched_tenant *tenant, uint64_t now)
{
    if (tenant->held != 0 && tenant->stopping)
        tenant->stays = stays_on(tenant, now);
    tenant->lingers = may_linger(tenant, now);
    bool backfills = may_backfill(tenant, now);
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        struct sched_entity *entity = tenant->entities[d];
        bool to = backfills && (tenant->wanted >> d & 1) != 0;
        if (to && !entity->backfills)
            entity->charged_until = now;
        if (to != entity->backfills)
            fair_refresh(entity->device, now);
        entity->backfills = to;
        if (to)
            forgive(entity, now);
    }
}
