/*
 * rate.h: a token bucket that limits the costs that a tenant causes for the arbiter, in units. A message costs 1 unit;
 * libvgpu needs a few for each time slice. 10 000 messages per second are some 7 % of a core. A burst of 256 processes
 * that come at once fits.
 */
#ifndef ARBITER_RATE_H
#define ARBITER_RATE_H

#include <stdbool.h>
#include <stdint.h>

#define RATE_UNITS_PER_S 10000
#define RATE_BURST_UNITS 20000
#define RATE_CONNECTION_UNITS 20u /* units for a connection that is accepted and closed */
#define RATE_NS_PER_UNIT 7000u    /* nanoseconds of measured work that cost one unit */

struct rate {
    int64_t units;  /* units at the time `at_ns`; negative: debt */
    uint64_t at_ns; /* time in CLOCK_MONOTONIC; 0: the bucket is full */
};

/* Adds the units earned until `now_ns`, which never decreases, and returns the sum. */
static inline int64_t rate_fill(struct rate *rate, uint64_t now_ns)
{
    const uint64_t ns_per_unit = 1000000000u / RATE_UNITS_PER_S;
    uint64_t came = (now_ns - rate->at_ns) / ns_per_unit;
    if (rate->at_ns == 0 || came >= 2 * RATE_BURST_UNITS) {
        *rate = (struct rate){.units = RATE_BURST_UNITS, .at_ns = now_ns};
        return rate->units;
    }
    rate->at_ns += came * ns_per_unit;
    rate->units += (int64_t)came;
    if (rate->units > RATE_BURST_UNITS)
        rate->units = RATE_BURST_UNITS;
    return rate->units;
}

/*
 * Takes `units` from the bucket, which may then be in debt by at most one burst. Returns false if the bucket was empty
 * or in debt before.
 */
static inline bool rate_take(struct rate *rate, uint32_t units, uint64_t now_ns)
{
    bool left = rate_fill(rate, now_ns) > 0;
    rate->units -= units;
    if (rate->units < -RATE_BURST_UNITS)
        rate->units = -RATE_BURST_UNITS;
    return left;
}

#endif
