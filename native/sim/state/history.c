/*
 * The history of a queue: its recent runs. They say at which time a position was reached, if it is in the last
 * SIM_SEGMENTS runs, and how busy the queue was in the last second.
 */
#include "state.h"

#include <math.h>

static struct sim_segment *newest(struct sim_queue *q)
{
    return q->segment_count == 0 ? NULL : &q->segments[(q->segment_count - 1) % SIM_SEGMENTS];
}

static void append(struct sim_queue *q, struct sim_segment segment)
{
    q->segments[q->segment_count % SIM_SEGMENTS] = segment;
    __atomic_store_n(&q->segment_count, q->segment_count + 1, __ATOMIC_RELEASE);
}

/* Returns the time at which the queue's position is `done`, if the queue runs as the segment says. */
static uint64_t resumes_at(const struct sim_segment *g, double done)
{
    double work = done - g->done, periods = 0;
    if (g->period_ns > 0) {
        periods = floor((work + SIM_WORK_EPSILON_NS) / g->chunk);
        work = fmax(work - periods * g->chunk, 0);
    }
    return g->at_ns + (uint64_t)periods * g->period_ns + (uint64_t)(work / g->rate + 0.5);
}

/*
 * Records that the queue has the engine from now on; if slice_ns > 0, for at most one slice. Full slices at regular
 * intervals make one segment, whatever their number.
 */
void sim_history_run(struct sim_queue *q, uint64_t at_ns, double rate, uint64_t slice_ns)
{
    struct sim_segment *g = newest(q);
    if (g != NULL && g->rate == rate) {
        uint64_t known = resumes_at(g, q->done);
        bool follows = (known > at_ns ? known - at_ns : at_ns - known) <= 1;
        if (follows && (slice_ns > 0 || g->period_ns == 0))
            return;
        double chunk = (double)slice_ns * rate;
        if (slice_ns > 0 && g->period_ns == 0 && at_ns > g->at_ns + slice_ns &&
            fabs(q->done - g->done - chunk) <= SIM_WORK_EPSILON_NS) {
            g->chunk = chunk;
            g->period_ns = at_ns - g->at_ns;
            return;
        }
    }
    append(q, (struct sim_segment){.at_ns = at_ns, .done = q->done, .rate = rate});
}

/* Completes the work before `position` at once. */
void sim_history_jump(struct sim_queue *q, uint64_t at_ns, double position)
{
    q->done = position;
    append(q, (struct sim_segment){.at_ns = at_ns, .done = position, .rate = 1});
}

static uint64_t when_in(const struct sim_segment *g, double position)
{
    double work = position - g->done, periods = 0;
    if (work <= 0)
        return g->at_ns;
    if (g->period_ns > 0) { /* the position is at the end of a slice, not at the beginning of the next one */
        periods = fmax(ceil((work - SIM_WORK_EPSILON_NS) / g->chunk) - 1, 0);
        work -= periods * g->chunk;
    }
    return g->at_ns + (uint64_t)periods * g->period_ns + (uint64_t)(work / g->rate);
}

uint64_t sim_history_when(const struct sim_queue *q, double position)
{
    uint32_t oldest = q->segment_count > SIM_SEGMENTS ? q->segment_count - SIM_SEGMENTS : 0;
    /* start of the following segment: if a jump (sim_history_jump) began it, that jump may have reached the position */
    uint64_t until = UINT64_MAX;
    for (uint32_t i = q->segment_count; i > oldest; i--) {
        const struct sim_segment *g = &q->segments[(i - 1) % SIM_SEGMENTS];
        if (g->done < position || i - 1 == oldest) {
            uint64_t at = when_in(g, position);
            return at < until ? at : until;
        }
        until = g->at_ns;
    }
    return 0;
}

void sim_history_busy(uint64_t *epochs, uint64_t *sums, uint64_t from_ns, uint64_t to_ns, double share)
{
    if (to_ns - from_ns > SIM_BUCKETS * SIM_BUCKET_NS)
        from_ns = to_ns - SIM_BUCKETS * SIM_BUCKET_NS;
    while (from_ns < to_ns) {
        uint64_t epoch = from_ns / SIM_BUCKET_NS, end = (epoch + 1) * SIM_BUCKET_NS;
        uint32_t slot = (uint32_t)(epoch % SIM_BUCKETS);
        if (epochs[slot] != epoch) {
            epochs[slot] = epoch;
            sums[slot] = 0;
        }
        sums[slot] += (uint64_t)((double)((to_ns < end ? to_ns : end) - from_ns) * share);
        from_ns = end;
    }
}

uint32_t sim_history_percent(const uint64_t *epochs, const uint64_t *sums)
{
    uint64_t epoch = sim_now_ns() / SIM_BUCKET_NS, busy = 0;
    for (uint64_t e = epoch - 8; e < epoch; e++)
        if (epochs[e % SIM_BUCKETS] == e)
            busy += sums[e % SIM_BUCKETS];
    uint64_t p = busy * 100 / (8 * SIM_BUCKET_NS);
    return p > 100 ? 100 : (uint32_t)p;
}
