/*
 * rotation.c: the simulated engine's time slices, with a clock that the test sets. Takes commands on standard input.
 *
 * rotation SLICE_US SWITCH_US, then lines of nanoseconds since the start:
 *   client REF FRACTION     declares the queue as an MPS client's
 *   submit NOW REF WORK     advances to NOW, then adds work
 *   leave NOW REF           advances to NOW, then removes the process
 *   torn NOW                the holder of the lock was killed: the list of active queues is invalid
 *   look NOW                prints "REF POSITION REACHED_NS" for each position reached since the last command
 */
#include <stdio.h>
#include <stdlib.h>

#include "../../../native/sim/state/state.h"

enum { QUEUES = 8, POSITIONS = 256 };

static struct sim_state *s;
static struct sim_device *d;
static uint64_t now;
static double waiting[QUEUES][POSITIONS];
static int added[QUEUES], told[QUEUES];

uint64_t sim_now_ns(void)
{
    return now;
}

struct sim_engine *sim_engine_of(struct sim_device *device, int gi, int ci)
{
    (void)gi;
    (void)ci;
    return &device->whole;
}

static struct sim_use *use(unsigned ref)
{
    return &s->procs[ref].uses[0];
}

static void look(uint64_t at)
{
    now = at;
    sim_rotate(s, d, &d->whole, now);
}

static void submit(unsigned ref, double work)
{
    struct sim_queue *q = &use(ref)->queue;
    if (!q->active) {
        q->active = 1;
        d->whole.active[d->whole.active_count++] = ref * SIM_MAX_USES;
    }
    q->submitted += work;
    waiting[ref][added[ref]++] = q->submitted;
}

static void tell(void)
{
    for (unsigned ref = 0; ref < QUEUES; ref++) {
        const struct sim_queue *q = &use(ref)->queue;
        while (told[ref] < added[ref] && q->done + SIM_WORK_EPSILON_NS >= waiting[ref][told[ref]]) {
            double position = waiting[ref][told[ref]++];
            printf("%u %.0f %llu\n", ref, position, (unsigned long long)sim_history_when(q, position));
        }
    }
}

int main(int argc, char **argv)
{
    char word[16];
    unsigned long long at;
    unsigned ref;
    double value;
    s = calloc(1, sizeof(*s));
    if (s == NULL || argc != 3)
        return 2;
    d = &s->devices[0];
    d->timeslice_us = atof(argv[1]);
    d->context_switch_us = atof(argv[2]);
    s->proc_high = QUEUES;
    for (ref = 0; ref < QUEUES; ref++)
        *use(ref) = (struct sim_use){.used = 1, .gi = SIM_NONE, .ci = SIM_NONE};
    while (scanf("%15s", word) == 1) {
        if (word[0] == 'c' && scanf("%u %lf", &ref, &value) == 2) {
            use(ref)->mps = 1;
            use(ref)->mps_fraction = value;
        } else if (word[0] == 's' && scanf("%llu %u %lf", &at, &ref, &value) == 3) {
            look(at);
            submit(ref, value);
        } else if (word[0] == 'l' && word[1] == 'e' && scanf("%llu %u", &at, &ref) == 2) {
            look(at);
            sim_rotation_leave(&d->whole, ref * SIM_MAX_USES);
            use(ref)->queue.active = use(ref)->used = 0;
            added[ref] = told[ref];
        } else if (word[0] == 't' && scanf("%llu", &at) == 1) {
            look(at);
            d->whole.active[0] = d->whole.active[d->whole.active_count] = 3;
            sim_rotation_mend(s, d);
        } else if (word[0] == 'l' && scanf("%llu", &at) == 1) {
            look(at);
            tell();
        } else {
            return 2;
        }
    }
    return 0;
}
