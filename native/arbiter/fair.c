#include "fair.h"

/*
 * A tenant with share s in rounds of R ms deviates from its share by up to s(1-s)R in a window. Rounds are as long as
 * possible with a deviation near 6 ms, which is 2.4 percentage points of a 250 ms window.
 */
#define DEVIATION_NS 6e6
#define ROUND_MAX_NS 80e6
#define SHARED_ROUND_NS 30e6 /* contribution of each competing tenant to the length of a round */
/* the same contribution of a tenant under the engine cut, whose hand-over takes 700 us */
#define CUT_ROUND_NS 40e6
#define SHARED_ROUND_MAX_NS 200e6
#define QUANTUM_MIN_NS 500e3
/*
 * The hand-over of a tenant with many contexts takes milliseconds, and its contexts run unequally long meanwhile. If
 * such a tenant is alone, rounds are so long (up to ROUND_LONGEST_NS) that its quantum is twenty of these hand-overs.
 * Beside other tenants it pays for the hand-overs with its own time, so that contexts made on purpose lengthen no other
 * tenant's wait. A hand-over by one call lengthens nothing.
 *
 * The number of calls counts and not the time that they took: calls for two devices wait for each other in the driver,
 * in either order. Rounds that become shorter cost a tenant the tokens above the new maximum.
 */
#define HAND_OVER_CALL_NS 800000u /* usual duration of a call that disables channels and one that enables them */
#define HAND_OVERS_PER_QUANTUM 20
#define ROUND_LONGEST_NS 700e6
#define ACTIVE_NS 100000000ull /* a tenant that gave a slice back less than this time ago counts in the weights */
#define WINDOW_MIN_NS 100e3
#define WINDOW_MAX_NS 2e6
#define NONE_SHARE_MIN 0.01
/*
 * spare_ns: part of the device that is earned beyond the share, and the most that is saved, in rounds; a slice of its
 * own takes at most a quarter of a round. What is earned lets a tenant run beside others again some seconds later, which
 * shows whether their work still has gaps.
 */
#define SPARE_PART 0.0025
#define SPARE_ROUNDS 2.0

/* Returns whether the tenant of this entity has processes. */
static bool is_present(const struct sched_entity *entity)
{
    return entity->tenant->members != NULL;
}

/* Returns whether the entity competes for time slices: it wants or holds one, or has held one recently. */
static bool is_active(const struct sched_entity *entity, uint64_t now)
{
    const struct sched_tenant *tenant = entity->tenant;
    if (!is_present(entity))
        return false;
    return tenant->held != 0 || tenant->wanted != 0 || (tenant->last_held != 0 && now - tenant->last_held < ACTIVE_NS);
}

static double asked(const struct sched_entity *entity)
{
    return entity->limits.share / (double)VGPU_SHARE_ALL;
}

bool fair_outranked(const struct sched_entity *entity)
{
    for (const struct sched_entity *p = entity->device->entities; p != NULL; p = p->next)
        if (p->limits.priority > entity->limits.priority && is_present(p))
            return true;
    return false;
}

bool fair_is_hard(const struct sched_entity *entity)
{
    return entity->limits.policy == VGPU_SHARE_HARD && entity->limits.share < VGPU_SHARE_ALL;
}

bool fair_matters(const struct sched_device *device)
{
    unsigned present = 0;
    bool limited = false;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        if (!is_present(p))
            continue;
        present++;
        limited |= p->limits.policy != VGPU_SHARE_NONE;
        if (fair_is_hard(p))
            return true;
    }
    return limited && present > 1;
}

static double clamp(double value, double low, double high)
{
    return value < low ? low : value > high ? high : value;
}

static double weight(const struct sched_entity *entity)
{
    return entity->limits.policy == VGPU_SHARE_NONE ? entity->device->none_weight : asked(entity);
}

double fair_share(const struct sched_entity *entity)
{
    double mine = weight(entity);
    double all = entity->device->weights;
    if (fair_is_hard(entity) && all <= 1)
        return mine;
    return all > mine ? mine / all : 1;
}

/*
 * Sets the weights of the active entities. Those without a limit divide equally what the others leave, but each has at
 * least NONE_SHARE_MIN.
 */
static void weigh(struct sched_device *device, uint64_t now)
{
    double limited = 0;
    unsigned unlimited = 0;
    device->active = 0;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        if (!is_active(p, now))
            continue;
        device->active++;
        if (p->limits.policy == VGPU_SHARE_NONE)
            unlimited++;
        else
            limited += asked(p);
    }
    device->none_weight = clamp(unlimited > 0 ? (1 - limited) / unlimited : 1, NONE_SHARE_MIN, 1);
    device->weights = limited + unlimited * device->none_weight;
}

static double usual_round(const struct sched_device *device, uint64_t now)
{
    double length = ROUND_MAX_NS;
    /*
     * each hand-over costs the device time, however long the round is: nearly 200 us with the gate, 700 us with the
     * engine cut
     */
    if (device->active > 1)
        return clamp((device->cut ? CUT_ROUND_NS : SHARED_ROUND_NS) * device->active, 0, SHARED_ROUND_MAX_NS);
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        if (!is_active(p, now))
            continue;
        double s = fair_share(p);
        s = clamp(s, 0.02, 0.98);
        length = clamp(DEVIATION_NS / (s * (1 - s)), 0, length);
    }
    return length;
}

/*
 * Returns the number of calls by which rounds are lengthened: those that take the entity's tenant off all its devices
 * if they are more than two, else those for this device if they are several, else 0. The work of a gang stands still
 * until the last call has put it on its last device.
 */
static uint32_t hand_over_calls(const struct sched_entity *entity)
{
    uint32_t all = 0;
    for (uint32_t d = 0; d < entity->tenant->device_count; d++)
        all += entity->tenant->entities[d]->hand_over_calls;
    return all > 2 ? all : entity->hand_over_calls > 1 ? entity->hand_over_calls : 0;
}

static double round_length(const struct sched_device *device, uint64_t now)
{
    double length = usual_round(device, now);
    if (device->active > 1)
        return length;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        double hand_over_ns = (double)hand_over_calls(p) * HAND_OVER_CALL_NS;
        if (!is_active(p, now) || hand_over_ns == 0)
            continue;
        double needed = HAND_OVERS_PER_QUANTUM * hand_over_ns / clamp(fair_share(p), 0.02, 1);
        length = clamp(needed, length, ROUND_LONGEST_NS);
    }
    return length;
}

/*
 * Returns the length of a device's rounds, at least that of every other device of an active tenant on it. A tenant gets
 * its devices together, so with a quantum of its own on each it would have the shortest on all of them.
 */
static double common_round(const struct sched_device *device, uint64_t now)
{
    double longest = device->own_round_ns;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        for (uint32_t d = 0; d < p->tenant->device_count && is_active(p, now); d++)
            longest = clamp(p->tenant->entities[d]->device->own_round_ns, longest, ROUND_LONGEST_NS);
    return longest;
}

double fair_quantum(const struct sched_entity *entity)
{
    double length = fair_share(entity) * entity->device->round_ns;
    return length > QUANTUM_MIN_NS ? length : QUANTUM_MIN_NS;
}

/*
 * Returns the maximum of tokens that an entity may save: those of one slice, so that even an entity that is alone is
 * above its share for no longer than about a round.
 */
static double most_tokens(const struct sched_entity *entity)
{
    double share = asked(entity);
    /* while the entity waits for other entities, it keeps earning tokens */
    double waits = 0;
    for (uint32_t d = 0; d < entity->tenant->device_count; d++)
        if (entity->tenant->entities[d]->device->active > 1)
            waits = fair_quantum(entity) / 2;
    return fair_quantum(entity) * (1 - share) + QUANTUM_MIN_NS * share + waits;
}

double fair_threshold(const struct sched_entity *entity, bool contended)
{
    return fair_quantum(entity) * (1 - asked(entity)) * (contended ? 0.5 : 1);
}

uint64_t fair_window(const struct sched_device *device, uint64_t now)
{
    double shortest = 4 * WINDOW_MAX_NS;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if (is_active(p, now)) {
            double quantum = fair_quantum(p);
            shortest = quantum < shortest ? quantum : shortest;
        }
    return (uint64_t)clamp(shortest / 4, WINDOW_MIN_NS, WINDOW_MAX_NS);
}

/*
 * Does the entity's virtual time count when the entities of a device are compared? It counts while the entity is
 * active, unless only the entity's own hard limit makes it wait. Entities of negative priority are compared only with
 * each other, and all others only with each other.
 */
static bool is_peer(const struct sched_entity *p, bool can_wait, uint64_t now)
{
    bool capped = fair_is_hard(p) && !p->holding && p->tokens_ns < fair_threshold(p, true);
    return is_active(p, now) && !capped && (p->limits.priority < 0) == can_wait;
}

static double least_vtime(const struct sched_device *device, const struct sched_entity *but, bool can_wait,
                          uint64_t now)
{
    double least = -1;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        if (p != but && is_peer(p, can_wait, now) && (least < 0 || p->vtime_ns < least))
            least = p->vtime_ns;
    return least;
}

static double peers_vtime(const struct sched_entity *entity, uint64_t now)
{
    return least_vtime(entity->device, entity, entity->limits.priority < 0, now);
}

double fair_ahead(const struct sched_entity *entity, uint64_t now)
{
    double least = peers_vtime(entity, now);
    return least >= 0 && entity->vtime_ns > least ? entity->vtime_ns - least : 0;
}

double fair_turn(const struct sched_entity *entity, uint64_t now)
{
    double length = fair_quantum(entity);
    double ahead = fair_ahead(entity, now);
    if (ahead > entity->device->round_ns / 2)
        return length; /* an entity gets this far ahead only if the others cannot use the time */
    return length - clamp(fair_share(entity) * ahead, 0, length / 2);
}

/*
 * Returns the virtual time that device time of the entity counts as. A gang is on all of its devices for as long as its
 * smallest share among them allows. With a share of its own on each device, it would seem to be behind for good where
 * its share is larger, and its competitors there to be ahead.
 */
static double virtual_ns(const struct sched_entity *entity, uint64_t used_ns)
{
    const struct sched_tenant *tenant = entity->tenant;
    double share = fair_share(entity);
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if (((tenant->held | tenant->wanted) >> d & 1) != 0)
            share = clamp(fair_share(tenant->entities[d]), 0, share);
    return (double)used_ns / (share > 0 ? share : 1);
}

void fair_charge(struct sched_entity *entity, uint64_t used_ns, uint64_t now)
{
    double most_debt = asked(entity) * (double)SCHED_DEBT_WAIT_NS;
    entity->count.used_ns += used_ns;
    entity->tokens_ns -= (double)used_ns;
    entity->spare_ns -= (double)used_ns;
    if (entity->tokens_ns < -most_debt)
        entity->tokens_ns = -most_debt;
    entity->vtime_ns += virtual_ns(entity, used_ns);
    double least = peers_vtime(entity, now);
    if (least >= 0 && entity->vtime_ns > least + (double)SCHED_DEBT_WAIT_NS)
        entity->vtime_ns = least + (double)SCHED_DEBT_WAIT_NS;
}

static double streams(const struct sched_entity *entity)
{
    return entity->streams > 1 ? entity->streams : 1;
}

/* Returns the number of streams (of all tenants on the device) among which the driver divides the device's time. */
static double on_device(const struct sched_device *device)
{
    double all = 0;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
        all += p->holding || p->backfills ? streams(p) : 0;
    return all;
}

double fair_part_beside(const struct sched_entity *entity)
{
    double others = on_device(entity->device) - (entity->holding || entity->backfills ? streams(entity) : 0);
    return streams(entity) / (others + streams(entity));
}

void fair_refresh(struct sched_device *device, uint64_t now)
{
    uint64_t passed = now > device->refreshed_at ? now - device->refreshed_at : 0;
    device->refreshed_at = now;
    weigh(device, now);
    device->own_round_ns = round_length(device, now);
    device->round_ns = common_round(device, now);
    double all = on_device(device);
    for (struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        if ((p->holding || p->backfills) && now > p->charged_until) {
            if (device->managed)
                fair_charge(p, (uint64_t)((double)(now - p->charged_until) * streams(p) / all), now);
            p->charged_until = now;
        }
        p->least_share = clamp(fair_share(p), 0, p->least_share);
        double most = most_tokens(p);
        p->tokens_ns += asked(p) * (double)passed;
        if (p->tokens_ns > most)
            p->tokens_ns = most;
        double saved = SPARE_ROUNDS * device->round_ns;
        p->spare_ns = clamp(p->spare_ns + (asked(p) + SPARE_PART) * (double)passed, -saved, saved);
        p->apart = fair_is_hard(p) && p->spare_ns < (p->apart ? saved / 2 : 0);
    }
}

void fair_refund(struct sched_entity *entity, uint64_t idle_ns)
{
    entity->tokens_ns += (double)idle_ns;
    entity->spare_ns += (double)idle_ns;
    entity->vtime_ns -= virtual_ns(entity, idle_ns);
    entity->count.used_ns -= idle_ns < entity->count.used_ns ? idle_ns : entity->count.used_ns;
}

/* The debt of a tenant survives its last process, so that a sequence of short processes counts as one tenant. */
void fair_come_back(struct sched_entity *entity, uint64_t now)
{
    double least = peers_vtime(entity, now);
    double most = most_tokens(entity);
    double earned = entity->left_at == 0 ? most : asked(entity) * (double)(now - entity->left_at);
    entity->tokens_ns = entity->tokens_ns + earned < most ? entity->tokens_ns + earned : most;
    entity->spare_ns += earned;
    if (least >= 0 && entity->vtime_ns > least + (double)SCHED_DEBT_WAIT_NS)
        entity->vtime_ns = least + (double)SCHED_DEBT_WAIT_NS;
    fair_wake(entity, now);
}

void fair_wake(struct sched_entity *entity, uint64_t now)
{
    double least = peers_vtime(entity, now);
    double credit = ROUND_MAX_NS / 2;
    if (least >= 0 && entity->vtime_ns < least - credit)
        entity->vtime_ns = least - credit;
}
