/*
 * sched_model.c: the scheduler of turns against a model of tenants in virtual time, at random.
 *
 *   sched-model SEED STEPS
 * Tenants with one to three devices come and go, launch and idle, answer late or never, die, and have their
 * limits changed. After every step: a managed device has at most one holder that was not bypassed; nobody
 * waits for a free device that he may have; no debt outgrows its bound. Exit status 0, or an abort.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fair.h"
#include "sched.h"

enum { DEVICES = 3, TENANTS = 9, MEMBERS = 3 };

#define CHECK(what)                                                                          \
    do {                                                                                     \
        if (!(what)) {                                                                       \
            fprintf(stderr, "seed %u step %ld: %s\n", seed, step, #what);                    \
            abort();                                                                         \
        }                                                                                    \
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
} nodes[TENANTS];

static unsigned seed;
static long step;
static uint64_t now = 1000000000;

static struct client *client_of(struct sched_member *member)
{
    return (struct client *)((char *)member - offsetof(struct client, member));
}

void sched_say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    struct client *client = client_of(member);
    client->granted = true;
    client->revoked = false;
    client->turn = *turn;
    client->granted_at = now;
}

void sched_say_revoke(struct sched_member *member)
{
    client_of(member)->revoked = true;
}

static unsigned dice(unsigned sides)
{
    static uint64_t state;
    if (state == 0)
        state = seed * 2862933555777941757ull + 3037000493ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % sides;
}

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

static void change(unsigned t)
{
    static const uint32_t shares[] = {100, 1000, 2500, 5000, 9000, 10000};
    struct sched_limits limits = {shares[dice(6)], dice(3), (int32_t)dice(3) - 1, dice(4) == 0 ? 1000 : 0};
    for (uint32_t d = 0; d < nodes[t].tenant.device_count; d++)
        sched_set_limits(&nodes[t].tenant, d, &limits);
}

static void client_step(unsigned t, struct client *client)
{
    if (!client->there) {
        sched_member_add(&nodes[t].tenant, &client->member);
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
            client->granted = false;
            sched_done(&client->member, &done, now);
            if (dice(30) == 0)
                sched_done(&client->member, &done, now); /* twice: stale */
        }
    }
}

static void check_device(const struct sched_device *device)
{
    uint32_t holders = 0;
    bool somebody_may = false;
    for (const struct sched_place *p = device->places; p != NULL; p = p->next) {
        const struct sched_tenant *tenant = p->tenant;
        CHECK(p->tokens_ns >= -1.001 * (double)SCHED_DEBT_WAIT_NS);
        CHECK(p->tokens_ns == p->tokens_ns && p->vtime_ns == p->vtime_ns);
        holders += p->holding;
        bool alone = tenant->device_count == 1;
        bool ready = !fair_is_hard(p) || p->tokens_ns >= fair_threshold(p, false);
        somebody_may |= alone && tenant->wanted != 0 && tenant->held == 0 && ready;
    }
    CHECK(holders == device->busy);
    if (device->managed)
        CHECK(!(somebody_may && holders == 0 && device->reserved == NULL));
}

/* From a managed start, with nothing running free: never two. */
static void check_exclusive(void)
{
    for (const struct sched_device *device = sched_devices(); device != NULL; device = device->next) {
        uint32_t turns = 0;
        bool single = false; /* a tenant of several devices may have been let onto one before it was managed */
        for (const struct sched_place *p = device->places; p != NULL; p = p->next)
            if (p->holding && !p->tenant->free_running) {
                turns += !p->tenant->stopping;
                single |= !p->tenant->stopping && p->tenant->device_count == 1 && p->tenant->granted_at == now;
            }
        if (device->managed)
            CHECK(turns <= 1 && (!single || device->busy == 1));
        check_device(device);
    }
}

/* Everybody answers and nobody wants more: whoever waits must get a turn. */
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

int main(int argc, char **argv)
{
    seed = argc > 1 ? (unsigned)atoi(argv[1]) : 1;
    long steps = argc > 2 ? atol(argv[2]) : 100000;
    uint64_t next = SCHED_NEVER;
    for (step = 0; step < steps; step++) {
        unsigned t = dice(TENANTS);
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
        if (next != SCHED_NEVER && next < now + passes) /* the timer */
            passes = next > now ? next - now : 1;
        now += passes;
        sched_run(now);
        check_exclusive();
    }
    check_liveness();
    printf("%ld steps\n", steps);
    return 0;
}
