/*
 * sched_exact.c: accuracy of the scheduler's shares, in virtual time. Tenants behave as measured on an H200: a
 * hand-over takes time that no tenant uses, and a time slice ends with a kernel.
 *
 *   sched-exact weights        tenants with endless work get their weights, in windows of 4 s
 *   sched-exact starving SEED  no tenant waits much longer than SCHED_STARVED_NS at any priority
 * Exit status 0, or an abort.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dice.h"
#include "fair.h"
#include "run_queue.h"
#include "scheduler.h"

enum { MOST = 9 };

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define ARRIVE_NS 138000u /* hand-over between two processes, measured on an H200 */
#define NOTICE_NS 12000u  /* delay until the arbiter knows that the device is idle */
#define LINGER_NS 80000u  /* delay until a process without work gives its time slice back */
#define WINDOW_NS 4000000000u
#define SECOND_NS 1000000000u

#define CHECK(what)                                         \
    do {                                                    \
        if (!(what)) {                                      \
            fprintf(stderr, "\n%s: %s\n", scenario, #what); \
            abort();                                        \
        }                                                   \
    } while (0)

struct worker {
    struct sched_tenant tenant;
    struct sched_member member;
    uint64_t kernel_ns;
    uint64_t period_ns; /* time between the starts of kernels; 0 if they follow each other at once */
    bool granted, revoked, finished;
    struct vgpu_turn turn;
    uint64_t granted_at;
    uint64_t next_at; /* the time of the next event: a kernel ends, its slice ends, or a request arrives */
    uint64_t asked_at;
    uint64_t work_ns, work_before_ns;
};

static struct worker workers[MOST];
static unsigned count;
static uint64_t now = SECOND_NS;
static uint64_t sched_at;
static char scenario[64];

static struct worker *worker_of(struct sched_member *member)
{
    return (struct worker *)((char *)member - offsetof(struct worker, member));
}

static void say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    struct worker *worker = worker_of(member);
    bool goes_on = worker->granted && worker->turn.number == turn->number;
    worker->turn = *turn;
    worker->granted_at = now;
    if (goes_on)
        return;
    worker->granted = true;
    worker->revoked = false;
    worker->finished = false;
    worker->next_at = now + ARRIVE_NS + worker->kernel_ns;
}

static void say_revoke(struct sched_member *member)
{
    worker_of(member)->revoked = true;
}

static const struct sched_messages messages = {.grant = say_grant, .revoke = say_revoke};

static void join(struct sched_limits limits, uint64_t kernel_ns, uint64_t period_ns)
{
    static const char uuid[1][VGPU_UUID_BYTES] = {"GPU-0"};
    struct worker *worker = &workers[count++];
    memset(worker, 0, sizeof(*worker));
    CHECK(sched_tenant_add(&worker->tenant, 1, uuid));
    sched_set_limits(&worker->tenant, 0, &limits);
    sched_member_add(&worker->tenant, &worker->member, now);
    worker->kernel_ns = kernel_ns;
    worker->period_ns = period_ns;
    worker->next_at = now;
}

static void kernel_ended(struct worker *worker)
{
    uint64_t length = worker->turn.length_ns;
    bool over = length != VGPU_TURN_OPEN_ENDED && now + worker->kernel_ns / 2 > worker->granted_at + length;
    worker->work_ns += worker->kernel_ns;
    worker->finished = over || worker->revoked || worker->period_ns > 0;
    worker->next_at = now + (!worker->finished ? worker->kernel_ns : worker->period_ns > 0 ? LINGER_NS : NOTICE_NS);
}

static void turn_ended(struct worker *worker)
{
    struct vgpu_turn done = worker->turn;
    done.flags = worker->period_ns > 0 ? 0 : VGPU_TURN_MORE;
    done.length_ns = ARRIVE_NS + (worker->period_ns > 0 ? LINGER_NS : 0);
    worker->granted = false;
    worker->next_at = SCHED_NEVER;
    if (worker->period_ns > 0)
        worker->next_at = worker->asked_at + worker->period_ns > now ? worker->asked_at + worker->period_ns : now;
    sched_done(&worker->member, &done, now);
}

/* Advances the tenant to its next event. Returns true if the scheduler has a decision to make. */
static bool step(struct worker *worker)
{
    if (worker->next_at > now)
        return false;
    if (worker->granted && !worker->finished) {
        kernel_ended(worker);
        return false;
    }
    if (worker->granted) {
        turn_ended(worker);
        return true;
    }
    worker->asked_at = now;
    worker->next_at = SCHED_NEVER;
    sched_want(&worker->member, 1, now);
    return true;
}

static void run_until(uint64_t end)
{
    for (;;) {
        uint64_t next = sched_at < end ? sched_at : end;
        for (unsigned i = 0; i < count; i++)
            next = workers[i].next_at < next ? workers[i].next_at : next;
        now = next > now ? next : now;
        if (now >= end)
            return;
        bool due = now >= sched_at;
        for (unsigned i = 0; i < count; i++)
            due |= step(&workers[i]);
        if (!due)
            continue;
        sched_at = sched_run(now);
        if (sched_at <= now)
            sched_at = now + 1000;
    }
}

static void end(void)
{
    for (unsigned i = 0; i < count; i++)
        sched_tenant_remove(&workers[i].tenant, now);
    count = 0;
    sched_at = 0;
}

/* --- weights */

/* The largest error of a window: at its ends a tenant may have one more time slice, or one more kernel. */
static double edge(double share)
{
    double round = 30e6 * count > 200e6 ? 200e6 : 30e6 * count;
    double kernel = (double)workers[0].kernel_ns;
    return (round + kernel / share) / WINDOW_NS + 0.005;
}

static void check_weights(const uint32_t *shares, unsigned tenants, uint32_t policy, uint64_t kernel_ns)
{
    double bias[MOST] = {0};
    double all = 0;
    unsigned windows = 10;
    double worst = 0;
    snprintf(scenario, sizeof(scenario), "%u tenants, policy %u, %lu us", tenants, policy, kernel_ns / 1000);
    for (unsigned i = 0; i < tenants; i++) {
        join((struct sched_limits){shares[i], policy, 0}, kernel_ns, 0);
        all += shares[i];
    }
    run_until(now + SECOND_NS);
    for (unsigned w = 0; w < windows; w++) {
        double done = 0;
        for (unsigned i = 0; i < count; i++)
            workers[i].work_before_ns = workers[i].work_ns;
        run_until(now + WINDOW_NS);
        for (unsigned i = 0; i < count; i++)
            done += (double)(workers[i].work_ns - workers[i].work_before_ns);
        CHECK(done / WINDOW_NS > (kernel_ns < 20000000 ? 0.985 : 0.96));
        for (unsigned i = 0; i < count; i++) {
            double off = (double)(workers[i].work_ns - workers[i].work_before_ns) / done / (shares[i] / all) - 1;
            CHECK(fabs(off) < edge(shares[i] / all));
            worst = fabs(off) > worst ? fabs(off) : worst;
            bias[i] += off / windows;
        }
    }
    fprintf(stderr, "%-32s worst window %.2f %%, in all", scenario, 100 * worst);
    for (unsigned i = 0; i < count; i++) {
        fprintf(stderr, " %+.2f", 100 * bias[i]);
        CHECK(fabs(bias[i]) < 0.006);
        const struct vgpu_compute *counted = &workers[i].tenant.entities[0]->count;
        CHECK(counted->granted_ns + counted->overrun_ns >= counted->used_ns &&
              counted->granted_ns < 1.3 * (double)counted->used_ns);
    }
    fprintf(stderr, "\n");
    end();
}

static int weights(void)
{
    static const uint32_t one_nine[] = {1000, 9000}, one_three[] = {2500, 7500}, small[] = {500, 9500};
    static const uint32_t three[] = {1000, 2000, 5000}, five[] = {500, 1000, 1500, 3000, 4000};
    static const uint32_t eight[] = {1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000};
    static const uint64_t kernels[] = {5000, 50000, 1000000, 20000000};
    for (unsigned k = 0; k < COUNT(kernels); k++) {
        for (uint32_t policy = VGPU_SHARE_HARD; policy <= VGPU_SHARE_WORK_CONSERVING; policy++) {
            check_weights(one_nine, 2, policy, kernels[k]);
            check_weights(one_three, 2, policy, kernels[k]);
            check_weights(small, 2, policy, kernels[k]);
            check_weights(five, 5, policy, kernels[k]);
        }
        check_weights(three, 3, VGPU_SHARE_WORK_CONSERVING, kernels[k]);
        check_weights(eight, 8, VGPU_SHARE_WORK_CONSERVING, kernels[k]);
    }
    return 0;
}

/* --- starving */

static int starving(void)
{
    static const uint64_t kernels[] = {50000, 1000000, 20000000};
    for (unsigned trial = 0; trial < 40; trial++) {
        unsigned tenants = 2 + dice(MOST - 1);
        uint64_t longest = 0;
        snprintf(scenario, sizeof(scenario), "seed %u trial %u", seed, trial);
        for (unsigned i = 0; i < tenants; i++) {
            uint32_t policy = dice(3) == 0 ? VGPU_SHARE_NONE : VGPU_SHARE_WORK_CONSERVING;
            int32_t priority = policy == VGPU_SHARE_NONE ? 0 : (int32_t)dice(3) - 1;
            uint32_t share = policy == VGPU_SHARE_NONE ? VGPU_SHARE_ALL : 100 + dice(10000 / tenants);
            join((struct sched_limits){share, policy, priority}, kernels[dice(3)], dice(4) == 0 ? 5000000 : 0);
        }
        for (uint64_t until = now + 5 * (uint64_t)SECOND_NS; now < until;) {
            run_until(now + 1000000);
            for (unsigned i = 0; i < count; i++) {
                const struct sched_tenant *tenant = &workers[i].tenant;
                uint64_t waits = tenant->wanted != 0 && tenant->held == 0 ? now - tenant->waits_since : 0;
                longest = waits > longest ? waits : longest;
                CHECK(waits < SCHED_STARVED_NS + 500000000);
            }
        }
        fprintf(stderr, "%s: %u tenants, longest wait %lu ms\n", scenario, tenants, longest / 1000000);
        end();
    }
    return 0;
}

int main(int argc, char **argv)
{
    sched_open(&messages);
    seed = argc > 2 ? (unsigned)atoi(argv[2]) : 1;
    if (argc > 1 && strcmp(argv[1], "weights") == 0)
        return weights();
    return starving();
}
