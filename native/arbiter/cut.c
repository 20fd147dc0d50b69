#include "cut.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channels.h"
#include "usage_io.h"
#include "fair.h"
#include "rest.h"

/*
 * The tenant's kernel still runs during the first half of the call that stops it: for 0.25 of 0.46 ms on an H100, for
 * 0.39 of 0.78 ms on an H200 with a slower host. A longer call waits for the driver's lock first, and the kernel runs.
 */
#define RUNS_ON_PART 2
#define LOST_MAX_NS 500000u
/* least interval between two orders to disable the same entity, because its tenant can cause such orders */
#define AGAIN_NS 5000000u
/*
 * interval between two readings of the tenants' load samples on a shared device: a tenant of a small share, or one with
 * gaps of some milliseconds, is beside the others for no longer than that at a time
 */
#define LOAD_NS 5000000u
#define LOAD_ALONE_NS 10000000u /* the same interval where the tenants have the device one after the other */
#define LOAD_AGAIN_NS 2000000u  /* least interval between two such readings, which a tenant can cause */
#define LOAD_MIN_MS 2u          /* least time on the device that a report of a tenant's load covers */
#define LOAD_MAX_MS 10000u      /* most time on the device that a report of a tenant's load covers */
#define NS_PER_MS 1000000u
/*
 * Number of refused orders in a row after which the engine cut is given up. A channel may be freed between its listing
 * and the call, and a tenant can create and free many. Each refusal costs the device's thread one call that fails at
 * once.
 */
#define TRIES 8u
/*
 * time after which a table that lists a missing file counts as false; a process that exits or was in an exec is
 * forgotten sooner
 */
#define MISSING_NS 5000000000u
#define GROUPS_PER_UNIT 32u /* number of groups that are read for one unit of a lease's rate (rate.h) */

/* state of an entity's channels; DOUBTFUL: an earlier arbiter ended while it disabled or enabled them */
enum state { UNKNOWN, DOUBTFUL, ON, OFF };

struct cut_device {
    struct cut_device *next;
    char uuid[VGPU_UUID_BYTES];
    uint8_t id[16];
    uint32_t users;
    bool cut;
    struct channels_thread *thread;
};

/*
 * A channel group that is disabled. The driver counts: a group that is disabled twice must be enabled twice (seen on an
 * H100). So a group is disabled only if it is known to be enabled. To enable an enabled group changes nothing.
 */
struct off_group {
    uint32_t slot;
    struct vgpu_channel_group group;
};

struct cut_entity {
    struct cut_device *device;
    struct off_group *off;
    uint32_t off_count;
    struct channels_order *order; /* the order in progress for this entity */
    enum state state;
    bool stale; /* the processes may have new channels */
    uint32_t refusals;
    /* time of the first of the consecutive orders that found no file for a listed group; 0 if there is none */
    uint64_t missing_since;
    /*
     * end of the first call of the last order that enabled the entity's channels: the entity's work runs from then on
     */
    uint64_t on_at;
    uint64_t off_at;
    uint64_t lost_ns;          /* nanoseconds of the slice that ends in which none of the entity's work ran */
    struct channels_load load; /* the counters of the last report */
    uint64_t loaded_at;        /* time of the last reading of the load samples; 0: none */
    bool load_shared;          /* whether other tenants were on the device at the last reading */
};

static struct cut_device *devices;
static struct lease *cut_leases;
static int run_folder = -1;
static void (*look_again)(void);

/* --- the engine of a device */

static bool says_cut(const char *uuid)
{
    char path[VGPU_UUID_BYTES + 16];
    char word[5] = "";
    snprintf(path, sizeof(path), "engines/%.63s", uuid);
    int fd = openat(run_folder, path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, word, sizeof(word) - 1);
    close(fd);
    return size >= 3 && memcmp(word, "cut", 3) == 0;
}

/*
 * Returns the record of a device, or NULL if memory is short. The device's engine is read when its first tenant comes,
 * and stays until its last tenant has left.
 */
static struct cut_device *device_get(const char *uuid)
{
    struct cut_device *device = devices;
    while (device != NULL && strncmp(device->uuid, uuid, sizeof(device->uuid)) != 0)
        device = device->next;
    if (device == NULL) {
        device = calloc(1, sizeof(*device));
        if (device == NULL)
            return NULL;
        memcpy(device->uuid, uuid, sizeof(device->uuid));
        device->next = devices;
        devices = device;
    }
    if (device->users++ == 0) {
        device->cut = run_folder >= 0 && channels_uuid(device->uuid, device->id) && says_cut(device->uuid);
        if (device->cut && !channels_device()) {
            fprintf(stderr, "vgpu-arbiter: device %s has the gate: there is no control device\n", device->uuid);
            device->cut = false;
        }
        if (device->cut && device->thread == NULL)
            device->cut = (device->thread = channels_thread_start()) != NULL;
    }
    return device;
}

/* --- orders */

static uint32_t process_count(const struct lease *lease)
{
    uint32_t count = 0;
    for (const struct process *p = lease->processes; p != NULL; p = p->next)
        count++;
    return count;
}

/*
 * Returns whether `off` is the group that a process lists now. Its first channel may be another one than when it was
 * disabled, because the process may have freed some of its channels.
 */
static bool is_group(const struct off_group *off, uint32_t slot, const struct vgpu_channel_group *group)
{
    bool found = false;
    if (off->slot == slot && off->group.client == group->client)
        for (uint32_t c = 0; c < VGPU_GROUP_CHANNELS; c++) /* not `count`: the tenant writes it */
            found |= off->group.channels[c] == group->channels[0];
    return found;
}

static bool is_off(const struct cut_entity *entity, uint32_t slot, const struct vgpu_channel_group *group)
{
    for (uint32_t i = 0; i < entity->off_count; i++)
        if (is_group(&entity->off[i], slot, group))
            return true;
    return false;
}

static void note_off(struct cut_entity *entity, const struct channels_process *process)
{
    if (process->count == 0)
        return;
    size_t size = (entity->off_count + process->count) * sizeof(entity->off[0]);
    struct off_group *more = realloc(entity->off, size);
    if (more == NULL)
        return;
    entity->off = more;
    for (uint32_t i = 0; i < process->count; i++)
        entity->off[entity->off_count++] = (struct off_group){process->slot, process->groups[i]};
}

static void forget_off(struct cut_entity *entity, const struct channels_process *process)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < entity->off_count; i++) {
        const struct off_group *off = &entity->off[i];
        bool back = false;
        for (uint32_t g = 0; g < process->count; g++)
            back |= is_group(off, process->slot, &process->groups[g]);
        if (!back)
            entity->off[kept++] = *off;
    }
    entity->off_count = kept;
}

static bool any_off(const struct cut_entity *entity, uint32_t slot)
{
    for (uint32_t i = 0; i < entity->off_count; i++)
        if (entity->off[i].slot == slot)
            return true;
    return false;
}

/* Removes the groups from an order that are already in the desired state. */
static void keep_others(const struct cut_entity *entity, struct channels_process *process, bool off)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < process->count; i++)
        if (is_off(entity, process->slot, &process->groups[i]) != off)
            process->groups[kept++] = process->groups[i];
    process->count = kept;
}

static struct channels_order *order_make(const struct lease *lease, uint32_t ordinal, bool off)
{
    uint32_t budget = CHANNELS_GROUPS_MAX;
    struct channels_order *order = calloc(1, sizeof(*order));
    if (order == NULL)
        return NULL;
    order->off = off;
    order->ordinal = ordinal;
    order->tenant = lease_tenant(lease);
    order->usage_map = usage_io_map(lease->usage_fd);
    if (order->usage_map == NULL)
        return order;
    order->processes = calloc(process_count(lease) + 1, sizeof(order->processes[0]));
    for (const struct process *p = lease->processes; p != NULL && order->processes != NULL; p = p->next) {
        struct channels_process *to = &order->processes[order->process_count];
        if (!channels_read(lease->usage_fd, p->slot, lease->cut_entities[ordinal].device->id, &budget, to))
            continue;
        keep_others(&lease->cut_entities[ordinal], to, off);
        to->pidfd = to->count > 0 ? fcntl(p->pidfd.fd, F_DUPFD_CLOEXEC, 0) : -1;
        if (to->pidfd >= 0)
            order->process_count++;
        else
            free(to->groups);
    }
    return order;
}

/*
 * Records the groups that an earlier arbiter process has, or may have, disabled. The first call for an entity reads the
 * channel tables of all the lease's processes, a later call only those of processes that were found since.
 */
static void adopt(struct lease *lease, uint32_t ordinal)
{
    struct cut_entity *entity = &lease->cut_entities[ordinal];
    uint32_t budget = CHANNELS_GROUPS_MAX;
    bool first = entity->state == UNKNOWN;
    bool doubtful = false;
    for (struct process *p = lease->processes; p != NULL; p = p->next) {
        struct channels_process process;
        if (!first && (p->adopted >> ordinal & 1) != 0)
            continue;
        p->adopted |= 1u << ordinal;
        bool off = channels_read(lease->usage_fd, p->slot, entity->device->id, &budget, &process) &&
                   (process.off >> ordinal & 1) != 0;
        if (off)
            note_off(entity, &process);
        doubtful |= off && (!first || (process.doubtful >> ordinal & 1) != 0);
        free(process.groups);
    }
    if (first)
        entity->state = entity->off_count > 0 ? OFF : ON;
    if (doubtful)
        entity->state = DOUBTFUL;
    entity->stale |= first || doubtful;
}

static void set_state(struct cut_entity *entity, bool off, uint64_t now)
{
    entity->state = off ? OFF : ON;
    *(off ? &entity->off_at : &entity->on_at) = now;
}

/*
 * Submits an order to disable or enable an entity's channels. If no process has channels to change, or memory is short,
 * only records the state. If a thread still hangs in an order of the tenant, the tenant loses the engine cut
 * (lease->refused) and gets no order.
 */
static void give_order(struct lease *lease, uint32_t ordinal, bool off, uint64_t now)
{
    struct cut_entity *entity = &lease->cut_entities[ordinal];
    bool barred = channels_barred(lease_tenant(lease));
    struct channels_order *order = barred ? NULL : order_make(lease, ordinal, off);
    entity->stale = false;
    if (barred) {
        lease->refused = true;
        lease->refused_errno = ETIMEDOUT;
    }
    if (order == NULL || order->process_count == 0) {
        if (order != NULL)
            channels_order_free(order);
        entity->off_count = off ? entity->off_count : 0;
        entity->missing_since = off ? 0 : entity->missing_since;
        set_state(entity, off, now);
        return;
    }
    order->owner = lease;
    entity->order = order;
    channels_submit(entity->device->thread, order);
}

/*
 * Gives up the engine cut for a tenant after TRIES refusals, a timeout or a false table. Its channels are then enabled
 * on all of its devices, and the gate enforces its time slices. Channels that the arbiter cannot enable are enabled by
 * the tenant's process itself, as after the arbiter's end (libvgpu/compute/cut.h).
 */
static void give_up(struct lease *lease, const struct channels_order *order)
{
    struct cut_entity *entity = &lease->cut_entities[order->ordinal];
    if (!order->off)
        entity->off_count = 0;
    if (lease->refused)
        return;
    lease->refused = true;
    lease->refused_status = order->status;
    lease->refused_errno = order->error;
    fprintf(stderr,
            "vgpu-arbiter: lease %s: the driver refused to take it %s device %s, and it has the gate: status 0x%x, "
            "%s\n",
            lease->id, order->off ? "off" : "back onto", entity->device->uuid, order->status, strerror(order->error));
}

/* Records the result of an order: for each process the groups whose call was not refused. */
static void note_done(struct lease *lease, const struct channels_order *order)
{
    struct cut_entity *entity = &lease->cut_entities[order->ordinal];
    for (uint32_t p = 0; p < order->process_count; p++) {
        const struct channels_process *process = &order->processes[p];
        if (order->off)
            note_off(entity, process);
        else
            forget_off(entity, process);
        channels_note(lease->usage_map, process->slot, order->ordinal, any_off(entity, process->slot));
    }
    if (!order->off && order->failed == 0)
        entity->off_count = 0; /* the count may include groups that the process has freed */
}

/*
 * Records how many calls a hand-over took, and how long the device was idle in it. Some of the entity's channels run
 * until the last call of the order that disables them. The copying of a file, which the tenant can prolong, is not
 * counted. An order with a failed call is not recorded.
 */
static void note_hand_over(struct lease *lease, const struct channels_order *order)
{
    struct cut_entity *entity = &lease->cut_entities[order->ordinal];
    uint64_t lost = (order->last_ended_ns - order->last_began_ns) / RUNS_ON_PART;
    entity->lost_ns = 0;
    if (order->failed != 0 || order->calls == 0)
        return;
    if (order->off && entity->state == ON)
        sched_note_hand_over(lease->tenant.entities[order->ordinal], order->calls);
    if (order->off)
        entity->lost_ns = lost < LOST_MAX_NS ? lost : LOST_MAX_NS;
}

/*
 * Handles calls for which the process no longer had the file that its table names. If that lasts for MISSING_NS, the
 * table is false, and the tenant loses the engine cut; a process that exits is forgotten sooner. Until then the tenant
 * counts as off the device, and is disabled again.
 */
static void note_missing(struct lease *lease, struct channels_order *order)
{
    struct cut_entity *entity = &lease->cut_entities[order->ordinal];
    if (order->missing == 0)
        entity->missing_since = 0;
    else if (entity->missing_since == 0)
        entity->missing_since = order->ended_ns;
    if (entity->missing_since != 0 && order->ended_ns - entity->missing_since >= MISSING_NS) {
        order->error = EBADF;
        give_up(lease, order);
    }
    entity->stale |= order->missing > 0;
}

static void carried_out(struct channels_order *order)
{
    struct lease *lease = order->owner;
    if (lease == NULL)
        return;
    struct cut_entity *entity = &lease->cut_entities[order->ordinal];
    entity->order = NULL;
    note_hand_over(lease, order);
    set_state(entity, order->off, order->off || order->calls == 0 ? order->ended_ns : order->first_ended_ns);
    note_done(lease, order);
    if (order->off)
        note_missing(lease, order);
    if (order->failed == 0) {
        entity->refusals = 0;
    } else if (order->error != ETIMEDOUT && ++entity->refusals < TRIES) {
        entity->state = order->off ? ON : OFF;
        entity->stale = true;
    } else {
        entity->refusals = 0;
        give_up(lease, order);
    }
    look_again();
}

/* --- whether a tenant's channels must be enabled */

static bool others_have_work(const struct sched_entity *mine)
{
    for (const struct sched_entity *p = mine->device->entities; p != NULL; p = p->next) {
        if (p->tenant == mine->tenant)
            continue;
        if (p->holding)
            return true;
        for (uint32_t d = 0; d < p->tenant->device_count; d++)
            if ((p->tenant->wanted >> d & 1) != 0 && p->tenant->entities[d] == p)
                return true;
    }
    return false;
}

/*
 * Is the tenant the next holder of all devices for which it waits, and do their present holders leave? Then the
 * tenant's channels are enabled right after the calls that disable the others.
 */
static bool is_next(const struct sched_tenant *tenant)
{
    if (tenant->held != 0 || tenant->wanted == 0)
        return false;
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        const struct sched_entity *mine = tenant->entities[d];
        if ((tenant->wanted >> d & 1) == 0)
            continue;
        if (mine->device->next_entity != mine)
            return false;
        for (const struct sched_entity *p = mine->device->entities; p != NULL; p = p->next)
            if (p->holding && !p->tenant->stopping)
                return false;
    }
    return true;
}

static bool wants_off(const struct lease *lease, uint32_t ordinal)
{
    const struct sched_tenant *tenant = &lease->tenant;
    const struct sched_entity *entity = tenant->entities[ordinal];
    if (lease->refused)
        return false;
    if (lease->paused)
        return true;
    if (!entity->device->managed)
        return false;
    if (entity->holding)
        return tenant->stopping && !tenant->stays;
    if (entity->backfills || is_next(tenant))
        return false;
    if (tenant->lingers)
        return lease->cut_entities[ordinal].state == OFF;
    if (lease->suspended && tenant->wanted == 0 && tenant->held == 0)
        return false; /* the tenant is suspended, and a swap may need its channels */
    if (entity->limits.priority > 0 && entity->tokens_ns > 0 && tenant->wanted == 0)
        /*
         * An idle tenant of positive priority stays enabled while its share is not used up, so that its next work need
         * not wait for a call that enables the channels. While it has work on the device, it is charged.
         */
        return false;
    if (fair_is_hard(entity) || others_have_work(entity))
        return true;
    return lease->cut_entities[ordinal].state == OFF;
}

/* --- the load of a tenant */

static bool is_shared(const struct sched_entity *mine)
{
    for (const struct sched_entity *p = mine->device->entities; p != NULL; p = p->next)
        if (p != mine && (p->holding || p->backfills))
            return true;
    return false;
}

/*
 * Adds up the samples of the processes that use the device. The ranks of a gang use one device each: the sum of all
 * would make the load look as many times higher. A process of several devices counts its groups on all of them; they
 * are taken for equally many on each.
 */
static struct channels_load read_load(const struct lease *lease, uint32_t ordinal)
{
    struct channels_load sum = {0};
    for (const struct connection *c = lease->connections; c != NULL; c = c->next) {
        uint32_t used = (uint32_t)__builtin_popcount(c->member.devices);
        struct channels_load one;
        if (!c->joined || (c->member.devices >> ordinal & 1) == 0 || !channels_load(lease->usage_fd, c->slot, &one))
            continue;
        sum.sampled_ms += one.sampled_ms;
        sum.waiting_ms += one.waiting_ms;
        sum.busy_ms += one.busy_ms;
        sum.groups += (one.groups + used - 1) / used;
    }
    return sum;
}

static uint32_t members_with_work(const struct sched_tenant *tenant, uint32_t ordinal)
{
    uint32_t count = 0;
    for (const struct sched_member *m = tenant->members; m != NULL; m = m->next)
        count += m->state != SCHED_IDLE ? m->devices >> ordinal & 1 : 0;
    return count;
}

/*
 * Reports the load of an entity since the last report, if its samples cover LOAD_MIN_MS; otherwise they count in the
 * next report. The counters are cumulative, and stand still while the tenant is off the device. No report follows if
 * they are implausible (they jump when a process ends), or if the device has become shared or unshared meanwhile.
 */
static void report_load(struct lease *lease, uint32_t ordinal, uint64_t now)
{
    struct cut_entity *entity = &lease->cut_entities[ordinal];
    bool shared = is_shared(lease->tenant.entities[ordinal]);
    bool known = entity->loaded_at != 0 && entity->load_shared == shared;
    struct channels_load load = read_load(lease, ordinal);
    uint32_t sampled_ms = load.sampled_ms - entity->load.sampled_ms;
    uint32_t waiting_ms = load.waiting_ms - entity->load.waiting_ms;
    uint32_t busy_ms = load.busy_ms - entity->load.busy_ms;
    entity->loaded_at = now;
    entity->load_shared = shared;
    if (known && sampled_ms < LOAD_MIN_MS)
        return;
    entity->load = load;
    if (!known || sampled_ms > LOAD_MAX_MS || busy_ms > sampled_ms || waiting_ms > sampled_ms)
        return;
    uint32_t members = members_with_work(&lease->tenant, ordinal);
    sched_note_waits(lease->tenant.entities[ordinal], (double)waiting_ms / sampled_ms,
                     (uint64_t)sampled_ms * NS_PER_MS / (members > 0 ? members : 1), now);
    sched_note_load(lease->tenant.entities[ordinal], (double)busy_ms / sampled_ms * members,
                    (uint64_t)sampled_ms * NS_PER_MS / (members > 0 ? members : 1), load.groups, now);
    look_again();
}

static bool has_load(const struct lease *lease, uint32_t ordinal)
{
    const struct cut_entity *entity = &lease->cut_entities[ordinal];
    const struct sched_entity *of = lease->tenant.entities[ordinal];
    return of->device->managed && entity->state == ON && entity->order == NULL && (of->holding || of->backfills);
}

static uint64_t load_interval(const struct cut_entity *entity)
{
    return entity->load_shared ? LOAD_NS : LOAD_ALONE_NS;
}

/*
 * Reads the load of a tenant that is on the device, if a reading is due. Returns when to call this function again;
 * SCHED_NEVER if the tenant is not on the device, or no other tenant has work there.
 */
static uint64_t look_at_load(struct lease *lease, uint32_t ordinal, uint64_t now)
{
    struct cut_entity *entity = &lease->cut_entities[ordinal];
    const struct sched_entity *of = lease->tenant.entities[ordinal];
    if (!has_load(lease, ordinal))
        return SCHED_NEVER;
    if (now >= entity->loaded_at + load_interval(entity) || entity->load_shared != is_shared(of))
        report_load(lease, ordinal, now);
    return others_have_work(of) ? entity->loaded_at + load_interval(entity) : SCHED_NEVER;
}

void cut_note_load(struct lease *lease, uint64_t now)
{
    for (uint32_t d = 0; lease->cut_entities != NULL && d < lease->tenant.device_count; d++)
        if (has_load(lease, d) && now >= lease->cut_entities[d].loaded_at + LOAD_AGAIN_NS)
            report_load(lease, d, now);
}

static uint64_t follow_entity(struct lease *lease, uint32_t ordinal, bool offs, uint64_t now)
{
    struct cut_entity *entity = &lease->cut_entities[ordinal];
    bool off = wants_off(lease, ordinal);
    if (entity->order != NULL || off != offs)
        return SCHED_NEVER;
    if (off && entity->state == OFF && entity->stale && now < entity->off_at + AGAIN_NS)
        return entity->off_at + AGAIN_NS;
    if (entity->state == UNKNOWN || entity->stale || (off && entity->state == ON))
        adopt(lease, ordinal);
    if (entity->state == DOUBTFUL)
        /*
         * some channels may be disabled already, and the driver counts how often: all are enabled first, and the next
         * call of this function disables them
         */
        off = false;
    if (entity->state != (off ? OFF : ON) || (off ? entity->stale : entity->off_count > 0))
        give_order(lease, ordinal, off, now);
    return SCHED_NEVER;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/*
 * Ends a tenant's stopping time slice when its channels are disabled on all devices of the slice that have time slices.
 * They stay enabled on the others, and on all if the tenant stays (sched_tenant.stays).
 */
static void settle(struct lease *lease, uint64_t now)
{
    struct sched_tenant *tenant = &lease->tenant;
    uint64_t late = 0;
    uint64_t lost = 0;
    if (tenant->held == 0 || !tenant->stopping)
        return;
    for (uint32_t d = 0; d < tenant->device_count; d++) {
        const struct cut_entity *entity = &lease->cut_entities[d];
        if ((tenant->held >> d & 1) == 0 || tenant->stays || !tenant->entities[d]->device->managed)
            continue;
        if (entity->state != OFF || entity->order != NULL)
            return;
        /* a gang works only while it is on all of its devices */
        late = later(late, entity->on_at > tenant->granted_at ? entity->on_at - tenant->granted_at : 0);
        lost = later(lost, entity->lost_ns + (now - entity->off_at)); /* the event loop learns late of the last call */
    }
    sched_cut_done(tenant, late + lost, now);
    look_again();
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

uint64_t cut_follow(uint64_t now)
{
    uint64_t next = SCHED_NEVER;
    for (struct lease *lease = cut_leases; lease != NULL; lease = lease->next_cut)
        for (uint32_t d = 0; d < lease->tenant.device_count; d++)
            next = earlier(next, follow_entity(lease, d, false, now));
    for (struct lease *lease = cut_leases; lease != NULL; lease = lease->next_cut) {
        for (uint32_t d = 0; d < lease->tenant.device_count; d++) {
            uint64_t at = follow_entity(lease, d, true, now);
            uint64_t load_at = look_at_load(lease, d, now);
            at = load_at < at ? load_at : at;
            next = at < next ? at : next;
        }
        settle(lease, now);
    }
    for (struct cut_device *device = devices; device != NULL; device = device->next)
        if (device->thread != NULL)
            next = earlier(next, channels_check(device->thread, now));
    return next;
}

/* --- leases */

int cut_open(int run_fd, const char *control_device, void (*changed)(void))
{
    look_again = changed;
    int error = channels_open(control_device, carried_out);
    if (error == 0)
        run_folder = run_fd;
    return error;
}

static void put_devices(struct lease *lease)
{
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        if (lease->cut_entities[d].device != NULL)
            lease->cut_entities[d].device->users--;
}

void cut_lease_add(struct lease *lease)
{
    bool all = true;
    lease->refused = false;
    if (run_folder < 0 || (lease->cut_entities = calloc(VGPU_MAX_DEVICES, sizeof(lease->cut_entities[0]))) == NULL)
        return;
    for (uint32_t d = 0; d < lease->tenant.device_count; d++) {
        struct cut_device *device = device_get(lease->tenant.entities[d]->device->uuid);
        lease->cut_entities[d].device = device;
        all &= device != NULL && device->cut;
    }
    if (!all) {
        put_devices(lease);
        free(lease->cut_entities);
        lease->cut_entities = NULL;
        return;
    }
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        lease->tenant.entities[d]->device->cut = true;
    lease->next_cut = cut_leases;
    cut_leases = lease;
}

void cut_lease_remove(struct lease *lease)
{
    struct lease **link = &cut_leases;
    if (lease->cut_entities == NULL)
        return;
    while (*link != lease)
        link = &(*link)->next_cut;
    *link = lease->next_cut;
    for (uint32_t d = 0; d < lease->tenant.device_count; d++) {
        struct cut_entity *entity = &lease->cut_entities[d];
        bool was_off = entity->state == OFF || (entity->order != NULL && entity->order->off);
        if (entity->order != NULL)
            entity->order->owner = NULL;
        struct channels_order *back = was_off && lease->usage_fd >= 0 ? order_make(lease, d, false) : NULL;
        if (back != NULL)
            channels_submit(entity->device->thread, back);
    }
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        free(lease->cut_entities[d].off);
    put_devices(lease);
    free(lease->cut_entities);
    lease->cut_entities = NULL;
}

bool cut_refused(const struct lease *lease)
{
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        if (lease->cut_entities[d].order != NULL || lease->cut_entities[d].state != ON)
            return false;
    return lease->refused;
}

/*
 * Returns the lease's devices on which the process has channel groups, as bits. *groups is the number of its groups on
 * all devices.
 */
static uint32_t devices_of(const struct lease *lease, uint32_t slot, uint32_t *groups)
{
    const uint8_t *uuids[VGPU_MAX_DEVICES];
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        uuids[d] = lease->cut_entities[d].device->id;
    return channels_devices(lease->usage_fd, slot, uuids, lease->tenant.device_count, groups);
}

/* Returns whether the tenant has moved and the process has not yet published its channels on the new device. */
static bool is_elsewhere(const struct lease *lease, uint32_t slot)
{
    uint32_t groups;
    return devices_of(lease, slot, &groups) == 0 && groups > 0;
}

bool cut_paused(const struct lease *lease)
{
    if (!lease->paused || lease->refused || lease->cut_entities == NULL)
        return false;
    for (const struct connection *c = lease->connections; c != NULL; c = c->next)
        if (c->joined && (!c->member.cut || is_elsewhere(lease, c->slot)))
            return false;
    for (uint32_t d = 0; d < lease->tenant.device_count; d++)
        if (lease->cut_entities[d].order != NULL || lease->cut_entities[d].state != OFF || lease->cut_entities[d].stale)
            return false;
    return true;
}

struct lease *cut_lease_next(const struct lease *lease)
{
    return lease == NULL ? cut_leases : lease->next_cut;
}

void cut_lease_stale(struct lease *lease)
{
    for (uint32_t d = 0; lease->cut_entities != NULL && d < lease->tenant.device_count; d++)
        lease->cut_entities[d].stale = true;
}

uint32_t cut_devices(struct lease *lease, uint32_t slot)
{
    uint32_t groups;
    if (lease->cut_entities == NULL)
        return 0;
    uint32_t bits = devices_of(lease, slot, &groups);
    rest_afford(lease, groups / GROUPS_PER_UNIT);
    return bits;
}
