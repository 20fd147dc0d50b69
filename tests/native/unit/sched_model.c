/*
 * sched_model.c: random tests of the time-slice scheduler against a model of tenants in virtual time.
 *
 *   sched-model SEED STEPS
 *   sched-model shares | ranks
 * Tenants with one to three devices start and end, launch and idle, answer late or never, die, and get other
 * limits; at times hours pass at once. After every step: a managed device has at most one holder that was not
 * bypassed; no tenant waits for a free device that it may use; every debt is within its bound. `shares`: tenants
 * with endless work each get their weight on each of their devices. `ranks`: tenants with a process on each of two
 * devices, whose kernels wait for each other. Exit status 0, or an abort.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dice.h"
#include "fair.h"
#include "scheduler.h"
#include "gang.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
enum { DEVICES = 3, TENANTS = 9, MEMBERS = 3, CROWD = 48 };

#define CHECK(what)                                                       \
    do {                                                                  \
        if (!(what)) {                                                    \
            fprintf(stderr, "seed %u step %ld: %s\n", seed, step, #what); \
            abort();                                                      \
        }                                                                 \
    } while (0)

struct client {
    struct sched_member member;
    bool there, granted, revoked, stuck;
    struct vgpu_turn turn;
    uint64_t granted_at;
};

static struct {
    struct sched_tenant tenant;
    bool there;
    struct client clients[MEMBERS];
} nodes[CROWD]; /* a random step uses only the first TENANTS of these entries */

static long step;
static uint64_t now = 1000000000;

static struct client *client_of(struct sched_member *member)
{
    return (struct client *)((char *)member - offsetof(struct client, member));
}

static void say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    struct client *client = client_of(member);
    /* a free-running tenant keeps its time slice until the revocation */
    bool free_running = (turn->flags & VGPU_TURN_FREE) != 0;
    CHECK(!free_running || (turn->length_ns == VGPU_TURN_OPEN_ENDED && !member->tenant->stopping));
    client->granted = true;
    client->revoked = false;
    client->turn = *turn;
    client->granted_at = now;
}

static void say_revoke(struct sched_member *member)
{
    client_of(member)->revoked = true;
}

static const struct sched_messages messages = {.grant = say_grant, .revoke = say_revoke};

static void come(unsigned t)
{
    char uuids[DEVICES][VGPU_UUID_BYTES] = {{0}};
    unsigned count = 1 + dice(DEVICES);
    unsigned first = dice(DEVICES);
    for (unsigned d = 0; d < count; d++)
        snprintf(uuids[d], sizeof(uuids[d]), "GPU-%u", (first + d) % DEVICES);
    CHECK(sched_tenant_add(&nodes[t].tenant, count, (const char (*)[VGPU_UUID_BYTES])uuids));
    nodes[t].there = true;
    memset(nodes[t].clients, 0, sizeof(nodes[t].clients));
}

/* Removes tenants down to `crowd`. With few tenants some are alone on their devices and run freely. */
static unsigned leave_to(unsigned crowd)
{
    for (unsigned t = crowd; t < TENANTS; t++)
        if (nodes[t].there) {
            sched_tenant_remove(&nodes[t].tenant, now);
            nodes[t].there = false;
        }
    return crowd;
}

static void change(unsigned t)
{
    static const uint32_t shares[] = {100, 1000, 2500, 5000, 9000, 10000};
    struct sched_limits limits = {shares[dice(6)], dice(3), (int32_t)dice(3) - 1};
    for (uint32_t d = 0; d < nodes[t].tenant.device_count; d++)
        sched_set_limits(&nodes[t].tenant, d, &limits);
}

static void client_step(unsigned t, struct client *client)
{
    if (!client->there) {
        sched_member_add(&nodes[t].tenant, &client->member, now);
        client->there = true;
    } else if (dice(200) == 0) {
        sched_member_remove(&client->member, now);
        memset(client, 0, sizeof(*client));
    } else if (!client->granted || dice(20) == 0) {
        if (dice(3) != 0)
            sched_want(&client->member, dice(8), now);
    } else if (client->stuck) {
        client->stuck = dice(50) != 0;
    } else {
        bool over = client->revoked || now - client->granted_at >= client->turn.length_ns;
        client->stuck = dice(40) == 0;
        if (!client->stuck && (over || dice(5) == 0)) {
            struct vgpu_turn done = client->turn;
            done.flags = dice(2) ? VGPU_TURN_MORE : 0;
            done.length_ns = dice(2) ? dice(2000000) : UINT64_MAX;
            done.devices = dice(2) ? 1u << dice(DEVICES) : done.devices; /* each process uses one device */
            client->granted = false;
            sched_done(&client->member, &done, now);
            if (dice(30) == 0)
                sched_done(&client->member, &done, now); /* the second report is stale */
        }
    }
}

/* Returns true if one of the devices that the tenant wants is busy. */
static bool waits_elsewhere(const struct sched_tenant *tenant)
{
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((tenant->wanted >> d & 1) != 0 && tenant->entities[d]->device->busy > 0)
            return true;
    return false;
}

/* Returns true if the tenant lacks devices and none of the missing ones is managed. */
static bool waits_for_nothing(const struct sched_tenant *tenant)
{
    uint32_t missing = gang_missing(tenant);
    for (uint32_t d = 0; d < tenant->device_count; d++)
        if ((missing >> d & 1) != 0 && tenant->entities[d]->device->managed)
            return false;
    return missing != 0;
}

static void check_device(const struct sched_device *device)
{
    uint32_t holders = 0;
    bool somebody_may = false;
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        const struct sched_tenant *tenant = p->tenant;
        CHECK(p->tokens_ns >= -1.001 * (double)SCHED_DEBT_WAIT_NS);
        CHECK(p->tokens_ns == p->tokens_ns && p->vtime_ns == p->vtime_ns);
        holders += p->holding;
        bool alone = tenant->device_count == 1;
        bool ready = !fair_is_hard(p) || p->tokens_ns >= fair_threshold(p, false);
        somebody_may |= alone && tenant->wanted != 0 && tenant->held == 0 && ready;
    }
    CHECK(holders == device->busy);
    for (const struct sched_entity *p = device->entities; p != NULL; p = p->next) {
        bool endless = p->holding && p->tenant->open_ended && !p->tenant->free_running;
        CHECK(!waits_for_nothing(p->tenant));
        CHECK(!(endless && device->managed && device->next_entity != NULL && device->next_entity != p));
    }
    if (device->managed)
        CHECK(!(somebody_may && holders == 0) ||
              (device->next_entity != NULL && waits_elsewhere(device->next_entity->tenant)));
}

/* Asserts that a process that may launch, by the messages it got, belongs to a tenant that has the time slice. */
static void check_gates(unsigned t)
{
    for (unsigned c = 0; nodes[t].there && c < MEMBERS; c++) {
        const struct client *client = &nodes[t].clients[c];
        bool over = client->revoked || now - client->granted_at >= client->turn.length_ns;
        if (client->there && client->granted && !over)
            CHECK(client->member.state == SCHED_RUNNING && nodes[t].tenant.held != 0);
    }
}

/*
 * Asserts that at most one tenant holds a time slice on a device that was managed from the start and has no
 * free-running tenant.
 */
static void check_exclusive(void)
{
    for (const struct sched_device *device = sched_devices(); device != NULL; device = device->next) {
        uint32_t turns = 0;
        bool single = false; /* a tenant of several devices may have got a device before it was managed */
        for (const struct sched_entity *p = device->entities; p != NULL; p = p->next)
            if (p->holding && !p->tenant->free_running) {
                turns += !p->tenant->stopping;
                single |= !p->tenant->stopping && p->tenant->device_count == 1 && p->tenant->granted_at == now;
            }
        if (device->managed)
            CHECK(turns <= 1 && (!single || device->busy == 1));
        check_device(device);
    }
    for (unsigned t = 0; t < TENANTS; t++)
        check_gates(t);
}

/* Lets all processes answer and want no more, and checks that every waiting tenant then gets a time slice. */
static void check_liveness(void)
{
    bool waiting = true;
    for (long round = 0; waiting; round++) {
        CHECK(round < 100000);
        waiting = false;
        for (unsigned t = 0; t < TENANTS; t++) {
            for (unsigned c = 0; nodes[t].there && c < MEMBERS; c++) {
                struct client *client = &nodes[t].clients[c];
                struct vgpu_turn done = client->turn;
                done.flags = 0;
                if (client->there && client->granted)
                    sched_done(&client->member, &done, now);
                client->granted = false;
            }
            waiting |= nodes[t].there && nodes[t].tenant.wanted != 0;
        }
        uint64_t next = sched_run(now);
        CHECK(next != SCHED_NEVER || sched_devices() != NULL);
        now += 1000000;
    }
}

/* --- shares */

struct wish {
    uint32_t first, count; /* the tenant's first device and its number of devices */
    uint32_t share, policy;
    double least, most; /* bounds of the part of a device's time that the tenant must get */
};

static void join(unsigned t, const struct wish *wish)
{
    char uuids[DEVICES][VGPU_UUID_BYTES] = {{0}};
    struct sched_limits limits = {wish->share, wish->policy, 0};
    for (unsigned d = 0; d < wish->count; d++)
        snprintf(uuids[d], sizeof(uuids[d]), "GPU-%u", wish->first + d);
    CHECK(sched_tenant_add(&nodes[t].tenant, wish->count, (const char (*)[VGPU_UUID_BYTES])uuids));
    for (unsigned d = 0; d < wish->count; d++) {
        struct client *client = &nodes[t].clients[d]; /* a process on each device */
        memset(client, 0, sizeof(*client));
        sched_set_limits(&nodes[t].tenant, d, &limits);
        sched_member_add(&nodes[t].tenant, &client->member, now);
        sched_want(&client->member, 1u << d, now);
        client->there = true;
    }
    nodes[t].there = true;
}

/* When its time slice is over or revoked, the client drains for some 100 us and asks for the next slice. */
static void saturate(struct client *client)
{
    struct vgpu_turn done = client->turn;
    bool over = client->revoked || now >= client->granted_at + client->turn.length_ns;
    if (!client->there || !client->granted || !over)
        return;
    done.flags = VGPU_TURN_MORE;
    done.length_ns = 0;
    client->granted = false;
    sched_done(&client->member, &done, now);
}

static void check_shares(const struct wish *wishes, unsigned count)
{
    const uint64_t length = count > TENANTS ? 4000000000u : 10000000000u;
    uint64_t end = now + length;
    for (unsigned t = 0; t < count; t++)
        join(t, &wishes[t]);
    for (; now < end; now += 100000) {
        for (unsigned t = 0; t < count; t++)
            for (unsigned c = 0; c < MEMBERS; c++)
                saturate(&nodes[t].clients[c]);
        sched_run(now);
        check_exclusive();
    }
    for (unsigned t = 0; t < count; t++) {
        uint32_t d = 0;
        while (!nodes[t].tenant.entities[d]->device->managed && d + 1 < wishes[t].count)
            d++;
        double got = (double)nodes[t].tenant.entities[d]->count.used_ns / (double)length;
        fprintf(stderr, "%s%.3f", t > 0 ? " " : "", got);
        CHECK(got > wishes[t].least && got < wishes[t].most);
    }
    fprintf(stderr, "\n");
    for (unsigned t = 0; t < count; t++)
        sched_tenant_remove(&nodes[t].tenant, now);
    CHECK(sched_devices() == NULL);
    memset(nodes, 0, sizeof(nodes));
}

static int shares(void)
{
    enum { HARD = VGPU_SHARE_HARD, LENT = VGPU_SHARE_WORK_CONSERVING, NONE = VGPU_SHARE_NONE };
    static const struct wish pairs_and_a_single[] = {
        {0, 2, 5000, LENT, 0.32, 0.345}, {0, 2, 5000, LENT, 0.32, 0.345}, {0, 1, 5000, LENT, 0.32, 0.345}};
    static const struct wish crossed[] = {{0, 2, 5000, LENT, 0.3, 0.36},
                                          {1, 2, 5000, LENT, 0.3, 0.36},
                                          {1, 1, 5000, LENT, 0.3, 0.36},
                                          {2, 1, 5000, LENT, 0.3, 0.7}};
    static const struct wish ring[] = {
        {0, 2, 5000, LENT, 0.3, 0.36}, {1, 2, 5000, LENT, 0.3, 0.36}, {0, 3, 5000, LENT, 0.3, 0.36}};
    static const struct wish hard[] = {{0, 1, 2500, HARD, 0.245, 0.252}, {0, 1, 7500, HARD, 0.74, 0.752}};
    static const struct wish alone[] = {{0, 1, 1000, HARD, 0.098, 0.102}};
    static const struct wish mixed[] = {
        {0, 1, 1000, HARD, 0.097, 0.102}, {0, 1, 3000, LENT, 0.29, 0.31}, {0, 1, 10000, NONE, 0.58, 0.62}};
    static const struct wish eight[] = {{0, 1, 1000, LENT, 0.12, 0.13}, {0, 1, 1000, LENT, 0.12, 0.13},
                                        {0, 1, 1000, LENT, 0.12, 0.13}, {0, 1, 1000, LENT, 0.12, 0.13},
                                        {0, 1, 1000, LENT, 0.12, 0.13}, {0, 1, 1000, LENT, 0.12, 0.13},
                                        {0, 1, 1000, LENT, 0.12, 0.13}, {0, 1, 1000, LENT, 0.12, 0.13}};
    check_shares(pairs_and_a_single, COUNT(pairs_and_a_single));
    check_shares(crossed, COUNT(crossed));
    check_shares(ring, COUNT(ring));
    check_shares(hard, COUNT(hard));
    check_shares(alone, COUNT(alone));
    check_shares(mixed, COUNT(mixed));
    check_shares(eight, COUNT(eight));
    static struct wish crowd[CROWD];
    for (unsigned t = 0; t < CROWD; t++)
        crowd[t] = (struct wish){0, 1, 100, LENT, 0.9 / CROWD, 1.1 / CROWD};
    check_shares(crowd, CROWD);
    return 0;
}

/* --- ranks: a kernel of one process runs until the kernel of the other process has ended, too */

enum { RANKS = 2, KERNEL_NS = 1000000, IDLE_NS = 250000, TICK_NS = 50000 };

struct job {
    bool launched[RANKS];
    uint64_t thinks_until[RANKS];
    uint64_t both_since; /* 0: only one process has launched */
    uint64_t steps;
};

static void rank_step(unsigned t, unsigned r, struct job *job, bool single)
{
    struct client *client = &nodes[t].clients[r];
    bool over = client->revoked || (client->granted && now - client->granted_at >= client->turn.length_ns);
    bool thinks = now < job->thinks_until[r];
    if (job->launched[r])
        return; /* a process whose kernel runs does not drain, even if its time slice is over */
    if (client->granted && !over && !thinks) {
        job->launched[r] = true;
        job->both_since = single || job->launched[1 - r] ? now : 0;
    } else if (client->granted && (over || job->thinks_until[r] > now + IDLE_NS)) {
        struct vgpu_turn done = client->turn;
        done.flags = thinks ? 0 : VGPU_TURN_MORE;
        done.length_ns = 0;
        done.devices = 1u << r;
        client->granted = false;
        sched_done(&client->member, &done, now);
    } else if (!client->granted && !thinks) {
        sched_want(&client->member, 1u << r, now);
    }
}

static void job_step(unsigned t, struct job *job, unsigned think_ns)
{
    bool single = nodes[t].tenant.device_count == 1;
    for (unsigned r = 0; r < nodes[t].tenant.device_count; r++)
        rank_step(t, r, job, single);
    if (job->both_since == 0 || now - job->both_since < KERNEL_NS)
        return;
    job->both_since = 0;
    job->steps++;
    for (unsigned r = 0; r < RANKS; r++) {
        job->launched[r] = false;
        job->thinks_until[r] = think_ns > 0 ? now + dice(think_ns) : 0;
    }
}

/* Runs for 10 s of virtual time. Each tenant makes at least `least` steps; one step takes 1 ms for a tenant alone. */
static void check_jobs(const struct wish *wishes, unsigned count, unsigned think_ns, uint64_t least)
{
    struct job jobs[TENANTS] = {{{0}, {0}, 0, 0}};
    uint64_t end = now + 10000000000u;
    for (unsigned t = 0; t < count; t++)
        join(t, &wishes[t]);
    for (; now < end; now += TICK_NS) {
        for (unsigned t = 0; t < count; t++)
            job_step(t, &jobs[t], think_ns);
        sched_run(now);
        check_exclusive();
    }
    for (unsigned t = 0; t < count; t++) {
        uint64_t bypasses = 0;
        for (uint32_t d = 0; d < wishes[t].count; d++)
            bypasses += nodes[t].tenant.entities[d]->count.bypasses;
        fprintf(stderr, "%s%lu steps, %lu bypasses", t > 0 ? "; " : "", jobs[t].steps, bypasses);
        CHECK(jobs[t].steps >= least && bypasses * 5 <= jobs[t].steps);
        sched_tenant_remove(&nodes[t].tenant, now);
    }
    fprintf(stderr, "\n");
    memset(nodes, 0, sizeof(nodes));
}

static int ranks(void)
{
    enum { HARD = VGPU_SHARE_HARD, LENT = VGPU_SHARE_WORK_CONSERVING, NONE = VGPU_SHARE_NONE };
    static const struct wish none[] = {{0, 2, 10000, NONE, 0, 0}};
    static const struct wish lent[] = {{0, 2, 5000, LENT, 0, 0}};
    static const struct wish hard[] = {{0, 2, 5000, HARD, 0, 0}};
    static const struct wish pairs[] = {{0, 2, 5000, LENT, 0, 0}, {0, 2, 5000, LENT, 0, 0}};
    static const struct wish capped[] = {{0, 2, 5000, HARD, 0, 0}, {0, 2, 5000, HARD, 0, 0}};
    static const struct wish with_single[] = {{0, 2, 5000, LENT, 0, 0}, {1, 1, 5000, LENT, 0, 0}};
    static const unsigned thinks[] = {0, 3000000, 30000000};
    static const uint64_t alone[] = {9000, 3000, 400};
    static const uint64_t shared[] = {4200, 2500, 330};
    for (unsigned i = 0; i < COUNT(thinks); i++) {
        check_jobs(none, 1, thinks[i], alone[i]);
        check_jobs(lent, 1, thinks[i], alone[i]);
        check_jobs(hard, 1, thinks[i], shared[i]);
        check_jobs(pairs, 2, thinks[i], shared[i]);
        check_jobs(capped, 2, thinks[i], shared[i]);
        check_jobs(with_single, 2, thinks[i], shared[i] / 2);
    }
    return 0;
}

int main(int argc, char **argv)
{
    sched_open(&messages);
    if (argc > 1 && strcmp(argv[1], "ranks") == 0)
        return ranks();
    if (argc > 1 && strcmp(argv[1], "shares") == 0)
        return shares();
    seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1;
    long steps = argc > 2 ? atol(argv[2]) : 100000;
    uint64_t next = SCHED_NEVER;
    unsigned crowd = TENANTS;
    for (step = 0; step < steps; step++) {
        if (dice(2000) == 0)
            crowd = leave_to(2 + dice(TENANTS - 1));
        unsigned t = dice(crowd);
        if (!nodes[t].there) {
            come(t);
            change(t);
        } else if (dice(2000) == 0) {
            sched_tenant_remove(&nodes[t].tenant, now);
            nodes[t].there = false;
        } else if (dice(500) == 0) {
            change(t);
        } else {
            client_step(t, &nodes[t].clients[dice(MEMBERS)]);
        }
        next = sched_run(now);
        check_exclusive();
        uint64_t passes = dice(4) == 0 ? dice(30000000) : dice(300000);
        if (next != SCHED_NEVER && next < now + passes) /* the scheduler's timer is due */
            passes = next > now ? next - now : 1;
        now += passes;
        if (dice(5000) == 0) /* the clock jumps, as after a suspension of the machine */
            now += dice(48) * 3600000000000;
        sched_run(now);
        check_exclusive();
    }
    check_liveness();
    printf("%ld steps\n", steps);
    return 0;
}
