/*
 * sched_backfill.c: tenants under the engine cut on one device, in virtual time. Work that runs beside other work takes
 * longer in proportion, and a tenant that is off the device makes no progress.
 *
 *   sched-backfill KIND WORK_US PERIOD_US ...   KIND: lent, hard or returns, 50 % each; a tenant for each three words
 * A tenant gets WORK_US of work every PERIOD_US; without a period its work is endless. `returns` is a tenant with lent
 * time that gets such work for 0.5 s, is idle until the end of the warm-up, and then has endless work. After 5 s of
 * warming up it prints, for each tenant and 20 s: percent of the device, percent of its time with work in which it was
 * off the device, and percent of its time on the device with work beside another tenant's.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler.h"

enum { MOST = 4, WORDS = 3 };
#define STEP_NS 50000u
#define LOAD_NS 10000000u     /* the interval of load reports, as in cut.c */
#define IDLE_AFTER_NS 250000u /* time without work after which libvgpu reports that a tenant is idle */
#define WARM_NS 5000000000u
#define PAUSE_AFTER_NS 500000000u /* of a tenant that returns */
#define LENGTH_NS 20000000000u

static struct worker {
    struct sched_tenant tenant;
    struct sched_member member;
    uint64_t work_ns, period_ns, next_at;
    double left_ns; /* rest of the present work */
    uint64_t done_at;
    bool works, on, returns;
    uint64_t load_ns, seen_ns; /* times since the last report of the load: time with work, and all time on the device */
    double used_ns;
    uint64_t worked_ns, off_ns, shared_ns;
} workers[MOST];
static unsigned count;
#define BEGIN_NS 1000000000u
static uint64_t now = BEGIN_NS;

static void say_grant(struct sched_member *member, const struct vgpu_turn *turn)
{
    (void)member;
    (void)turn;
}

static void say_revoke(struct sched_member *member)
{
    (void)member;
}

static const struct sched_messages messages = {.grant = say_grant, .revoke = say_revoke};

static bool join(char **words)
{
    static const char uuid[1][VGPU_UUID_BYTES] = {"GPU-0"};
    bool is_hard = strcmp(words[0], "hard") == 0;
    struct sched_limits limits = {5000, is_hard ? VGPU_SHARE_HARD : VGPU_SHARE_WORK_CONSERVING, 0};
    struct worker *worker = &workers[count++];
    if (!sched_tenant_add(&worker->tenant, 1, uuid))
        return false;
    worker->tenant.entities[0]->device->cut = true;
    sched_set_limits(&worker->tenant, 0, &limits);
    sched_member_add(&worker->tenant, &worker->member, now);
    worker->member.cut = true;
    worker->work_ns = strtoull(words[1], NULL, 10) * 1000;
    worker->period_ns = strtoull(words[2], NULL, 10) * 1000;
    worker->returns = strcmp(words[0], "returns") == 0;
    worker->next_at = now + count * 7000000;
    return true;
}

/* Starts work that is due, and ends a slice that is over. In this model all channels are disabled at once. */
static void begin_step(struct worker *worker)
{
    struct sched_tenant *tenant = &worker->tenant;
    if (worker->returns && now >= BEGIN_NS + PAUSE_AFTER_NS) {
        worker->returns = false;
        worker->period_ns = 0;
        worker->next_at = BEGIN_NS + WARM_NS;
    }
    if (now >= worker->next_at && worker->left_ns <= 0) {
        worker->left_ns = worker->period_ns > 0 ? (double)worker->work_ns : 1e18;
        worker->next_at += worker->period_ns;
        if (!worker->works)
            sched_want(&worker->member, 1, now);
        worker->works = true;
    }
    if (tenant->held != 0 && tenant->stopping)
        sched_cut_done(tenant, 0, now);
}

static void end_step(struct worker *worker, unsigned with_work)
{
    if (worker->left_ns > 0) {
        worker->worked_ns += STEP_NS;
        if (!worker->on) {
            worker->off_ns += STEP_NS;
            return;
        }
        worker->shared_ns += with_work > 1 ? STEP_NS : 0;
        worker->used_ns += (double)STEP_NS / with_work;
        worker->left_ns -= (double)STEP_NS / with_work;
        worker->load_ns += STEP_NS;
        worker->done_at = now + STEP_NS;
    }
    if (worker->works && worker->left_ns <= 0 && now >= worker->done_at + IDLE_AFTER_NS) {
        sched_idle(&worker->member, now - worker->done_at, now);
        worker->works = false;
    }
}

/* Records the load as cut.c does, only while another tenant has work. */
static void note_load(struct worker *worker)
{
    bool others = false;
    for (unsigned w = 0; w < count; w++)
        others |= &workers[w] != worker && workers[w].works;
    worker->seen_ns = worker->on && others ? worker->seen_ns + STEP_NS : 0;
    if (worker->seen_ns >= LOAD_NS) {
        double load = (double)worker->load_ns / (double)worker->seen_ns;
        sched_note_load(worker->tenant.entities[0], load, worker->seen_ns, 1, now);
        worker->seen_ns = 0;
    }
    if (worker->seen_ns == 0)
        worker->load_ns = 0;
}

static void step(void)
{
    unsigned with_work = 0;
    for (unsigned w = 0; w < count; w++)
        begin_step(&workers[w]);
    sched_run(now);
    for (unsigned w = 0; w < count; w++) {
        const struct sched_tenant *tenant = &workers[w].tenant;
        workers[w].on = tenant->held != 0 || tenant->entities[0]->backfills;
        with_work += workers[w].on && workers[w].left_ns > 0;
    }
    for (unsigned w = 0; w < count; w++) {
        end_step(&workers[w], with_work);
        note_load(&workers[w]);
    }
    now += STEP_NS;
}

int main(int argc, char **argv)
{
    sched_open(&messages);
    for (int word = 1; word + WORDS <= argc && count < MOST; word += WORDS)
        if (!join(argv + word))
            return 1;
    for (uint64_t end = now + WARM_NS; now < end;)
        step();
    for (unsigned w = 0; w < count; w++) {
        workers[w].worked_ns = workers[w].off_ns = workers[w].shared_ns = 0;
        workers[w].used_ns = 0;
    }
    for (uint64_t end = now + LENGTH_NS; now < end;)
        step();
    for (unsigned w = 0; w < count; w++) {
        const struct worker *of = &workers[w];
        double on_ns = (double)(of->worked_ns - of->off_ns);
        printf("%.2f %.2f %.2f\n", of->used_ns * 100 / LENGTH_NS, (double)of->off_ns * 100 / (double)of->worked_ns,
               (double)of->shared_ns * 100 / (on_ns > 0 ? on_ns : 1));
        sched_tenant_remove(&workers[w].tenant, now);
    }
    return 0;
}
