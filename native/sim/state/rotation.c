/*
 * Decides which process has an engine: the driver's time slicing.
 *
 * Processes with pending work take turns on the engine. A turn lasts one slice, and a context switch comes first. A
 * process that runs out of work gives up the rest of its slice. The clients of one MPS server run together in one turn,
 * each limited to its fraction of the SMs. A process that is alone is never interrupted, but its time is counted in
 * slices, so a newcomer waits for the end of the running slice. A kernel is interrupted wherever a slice ends, as on
 * cards since Pascal.
 *
 * Each reader first computes what has happened since the last reading. Rotations in which no process runs out of work
 * are equal and are computed in one step, so a reading costs O(processes) for each process that ran out of work.
 */
#include "state.h"

#include <math.h>

#define KEY_CLIENTS UINT32_MAX /* the key that stands for all MPS clients together */
#define KEY_LEFT (UINT32_MAX - 1)

struct turn {
    /* the process whose state the engine must hold in this turn: its reference plus one, or KEY_CLIENTS */
    uint32_t key;
    uint32_t first, count;
};

struct ring {
    uint32_t turns, at, members;
    struct turn turn[SIM_MAX_ACTIVE];
    uint32_t ref[SIM_MAX_ACTIVE];
    struct sim_use *use[SIM_MAX_ACTIVE];
    double rate[SIM_MAX_ACTIVE]; /* engine nanoseconds per nanosecond during the queue's turn */
    uint64_t alike_from_ns;      /* no search for equal rotations is made before this time */
};

static uint64_t slice_of(const struct sim_device *d)
{
    return d->timeslice_us < 1 ? 1000 : (uint64_t)(d->timeslice_us * 1e3);
}

static uint64_t switch_of(const struct sim_device *d)
{
    return d->context_switch_us < 0 ? 0 : (uint64_t)(d->context_switch_us * 1e3);
}

static struct sim_use *use_of(struct sim_state *s, uint32_t ref)
{
    return &s->procs[ref / SIM_MAX_USES].uses[ref % SIM_MAX_USES];
}

static double left_of(const struct sim_use *u)
{
    return u->queue.submitted - u->queue.done;
}

static void add(struct ring *r, uint32_t ref, struct sim_use *u)
{
    r->ref[r->members] = ref;
    r->use[r->members] = u;
    r->rate[r->members++] = 1;
    r->turn[r->turns - 1].count++;
}

static void begin_turn(struct ring *r, uint32_t key)
{
    r->turn[r->turns++] = (struct turn){key, r->members, 0};
}

/* Adds the MPS clients that have work, from index `from` on; the queues before that index are not clients. */
static void add_clients(struct sim_state *s, const struct sim_engine *e, uint32_t from, struct ring *r)
{
    double sum = 0;
    uint32_t first = r->members;
    begin_turn(r, KEY_CLIENTS);
    for (uint32_t i = from; i < e->active_count; i++) {
        struct sim_use *u = use_of(s, e->active[i]);
        if (!u->used || !u->mps || left_of(u) <= SIM_WORK_EPSILON_NS)
            continue;
        add(r, e->active[i], u);
        sum += u->mps_fraction;
    }
    for (uint32_t i = first; i < r->members; i++)
        r->rate[i] = sum > 1 ? r->use[i]->mps_fraction / sum : r->use[i]->mps_fraction;
}

/* Collects the queues that have work, in the order of their turns. A queue without work becomes inactive. */
static void gather(struct sim_state *s, const struct sim_engine *e, struct ring *r)
{
    bool clients = false;
    r->turns = r->at = r->members = 0;
    r->alike_from_ns = 0;
    for (uint32_t i = 0; i < e->active_count; i++) {
        struct sim_use *u = use_of(s, e->active[i]);
        if (!u->used)
            continue;
        if (left_of(u) <= SIM_WORK_EPSILON_NS) {
            u->queue.done = u->queue.submitted;
            u->queue.active = 0;
        } else if (!u->mps) {
            begin_turn(r, e->active[i] + 1);
            add(r, e->active[i], u);
        } else if (!clients) {
            clients = true;
            add_clients(s, e, i, r);
        }
    }
}

/* Writes the order of turns back, beginning with the queue that has the engine. */
static void scatter(struct sim_engine *e, const struct ring *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->turns; i++) {
        const struct turn *t = &r->turn[(r->at + i) % r->turns];
        for (uint32_t j = 0; j < t->count; j++)
            e->active[n++] = r->ref[t->first + j];
    }
    e->active_count = n;
}

static void pass(struct sim_engine *e, uint64_t to)
{
    sim_history_busy(e->bucket_epoch, e->bucket_ns, e->last_ns, to, 1);
    e->busy_ns_total += (double)(to - e->last_ns);
    e->last_ns = to;
}

static void turn_to(const struct sim_device *d, struct sim_engine *e, uint32_t key)
{
    if (e->holder == key && e->last_ns < e->slice_end_ns)
        return;
    e->ready_ns = e->last_ns + (e->holder == key || e->holder == 0 ? 0 : switch_of(d));
    e->slice_end_ns = e->ready_ns + slice_of(d);
    e->holder = key;
}

/*
 * Returns the number of whole rotations that end before `now` and after which every queue still has work.
 */
static uint64_t rotations_alike(const struct sim_device *d, const struct sim_engine *e, const struct ring *r,
                                uint64_t now)
{
    uint64_t slice = slice_of(d), most = (now - e->last_ns) / (r->turns * (slice + switch_of(d)));
    for (uint32_t i = 0; i < r->members && most > 0; i++) {
        double slices = ceil((left_of(r->use[i]) - SIM_WORK_EPSILON_NS) / ((double)slice * r->rate[i])) - 1;
        if (slices < (double)most)
            most = slices < 0 ? 0 : (uint64_t)slices;
    }
    return most;
}

/*
 * Runs a member's slices for `count` rotations; the first rotation begins at `at`. The history knows the interval after
 * the third slice at the latest.
 */
static void run_slices(struct sim_queue *q, double rate, uint64_t at, uint64_t slice, uint64_t period, uint64_t count)
{
    for (uint64_t i = 0; i < 3 && i < count; i++) {
        sim_history_run(q, at + i * period, rate, slice);
        q->done += (double)slice * rate * (i < 2 ? 1 : (double)(count - 2));
    }
}

static void skip_rotations(const struct sim_device *d, struct sim_engine *e, struct ring *r, uint64_t now)
{
    uint64_t slice = slice_of(d), each = slice + switch_of(d), period = r->turns * each;
    if (r->turns < 2 || e->last_ns != e->ready_ns || e->last_ns < r->alike_from_ns || now - e->last_ns < period)
        return;
    uint64_t count = rotations_alike(d, e, r, now), from = e->last_ns, to = from + count * period;
    r->alike_from_ns = to + period;
    for (uint32_t i = 0; i < r->turns && count > 0; i++) {
        const struct turn *t = &r->turn[(r->at + i) % r->turns];
        for (uint32_t j = t->first; j < t->first + t->count; j++) {
            struct sim_queue *q = &r->use[j]->queue;
            run_slices(q, r->rate[j], from + i * each, slice, period, count);
            sim_history_busy(q->bucket_epoch, q->bucket_ns, from, to, r->rate[j] * (double)slice / (double)period);
        }
    }
    pass(e, to);
    e->ready_ns += to - from;
    e->slice_end_ns += to - from;
}

/*
 * Returns the time until which the holder has run: `now`, or an earlier end of its slice if other queues wait, or an
 * earlier time at which one of its queues runs out of work.
 */
static uint64_t run_end(const struct sim_engine *e, const struct ring *r, uint64_t now)
{
    const struct turn *t = &r->turn[r->at];
    uint64_t end = r->turns > 1 && e->slice_end_ns < now ? e->slice_end_ns : now;
    for (uint32_t j = t->first; j < t->first + t->count; j++) {
        /* time is counted in whole nanoseconds, so the step is rounded up */
        double step = fmax(ceil(left_of(r->use[j]) / r->rate[j]), 1);
        if (step < (double)(end - e->last_ns))
            end = e->last_ns + (uint64_t)step;
    }
    return end;
}

/* Runs the holder until its turn ends or until `now`. Returns true if a queue ran out of work. */
static bool run(const struct sim_device *d, struct sim_engine *e, struct ring *r, uint64_t now)
{
    const struct turn *t = &r->turn[r->at];
    uint64_t end = run_end(e, r, now), slice = slice_of(d);
    bool finished = false, goes_on = false;
    for (uint32_t j = t->first; j < t->first + t->count; j++) {
        struct sim_queue *q = &r->use[j]->queue;
        sim_history_run(q, e->last_ns, r->rate[j], r->turns > 1 ? slice : 0);
        q->done = fmin(q->done + (double)(end - e->last_ns) * r->rate[j], q->submitted);
        sim_history_busy(q->bucket_epoch, q->bucket_ns, e->last_ns, end, r->rate[j]);
        bool over = left_of(r->use[j]) <= SIM_WORK_EPSILON_NS;
        finished |= over;
        goes_on |= !over;
    }
    pass(e, end);
    if (e->last_ns < e->slice_end_ns)
        return finished;
    if (r->turns > 1)
        r->at = (r->at + 1) % r->turns;
    else if (goes_on) /* a queue that comes back later begins a new slice */
        e->slice_end_ns += ((e->last_ns - e->slice_end_ns) / slice + 1) * slice;
    return finished;
}

void sim_rotate(struct sim_state *s, const struct sim_device *d, struct sim_engine *e, uint64_t now_ns)
{
    struct ring r;
    gather(s, e, &r);
    scatter(e, &r);
    while (r.turns > 0 && e->last_ns < now_ns) {
        turn_to(d, e, r.turn[r.at].key);
        if (e->last_ns < e->ready_ns) {
            pass(e, e->ready_ns < now_ns ? e->ready_ns : now_ns);
            continue;
        }
        skip_rotations(d, e, &r, now_ns);
        if (e->last_ns < now_ns && run(d, e, &r, now_ns)) {
            scatter(e, &r);
            gather(s, e, &r);
        }
    }
    scatter(e, &r);
    if (e->last_ns < now_ns)
        e->last_ns = now_ns;
}

/*
 * Returns how long the queue needs to reach `position`. The result is exact if no queue comes or goes and if the use
 * needs only its present or next slice; otherwise the result is the end of that slice.
 */
double sim_rotation_left(struct sim_state *s, const struct sim_device *d, struct sim_engine *e, const struct sim_use *u,
                         double position)
{
    struct ring r;
    double left = 0;
    gather(s, e, &r);
    for (uint32_t i = 0; i < r.turns; i++) {
        const struct turn *t = &r.turn[i];
        bool holds = i == 0 && e->holder == t->key && e->last_ns < e->slice_end_ns;
        uint64_t ready = holds && e->ready_ns > e->last_ns ? e->ready_ns - e->last_ns : 0;
        double slice = holds ? (double)(e->slice_end_ns - e->last_ns - ready) : (double)slice_of(d);
        double most = 0;
        left += holds || e->holder == t->key ? (double)ready : (double)switch_of(d);
        for (uint32_t j = t->first; j < t->first + t->count; j++) {
            if (r.use[j] == u) {
                double own = (position - u->queue.done) / r.rate[j];
                return left + (r.turns > 1 && own > slice ? slice : own) + 1;
            }
            most = fmax(most, left_of(r.use[j]) / r.rate[j]);
        }
        left += fmin(most, slice);
    }
    return 0;
}

void sim_rotation_leave(struct sim_engine *e, uint32_t ref)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < e->active_count; i++)
        if (e->active[i] != ref)
            e->active[kept++] = e->active[i];
    e->active_count = kept;
    if (e->holder == ref + 1)
        e->holder = KEY_LEFT; /* not the old reference, because another process may get it later */
}

void sim_rotation_mend(struct sim_state *s, struct sim_device *d)
{
    uint32_t high = atomic_load(&s->proc_high);
    d->whole.active_count = 0;
    for (int g = 0; g < SIM_MAX_GIS; g++)
        for (int c = 0; c < SIM_MAX_CIS; c++)
            d->mig_engines[g][c].active_count = 0;
    for (uint32_t ref = 0; ref < high * SIM_MAX_USES; ref++) {
        struct sim_use *u = use_of(s, ref);
        if (!u->used || &s->devices[u->device] != d || !u->queue.active)
            continue;
        struct sim_engine *e = sim_engine_of(d, u->gi, u->ci);
        if (e->active_count < SIM_MAX_ACTIVE)
            e->active[e->active_count++] = ref;
    }
}
