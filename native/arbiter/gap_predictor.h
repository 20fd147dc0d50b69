/* gap_predictor.h: predicts when a periodic event comes next, by the mean of its intervals and their mean deviation,
 * as TCP sets its retransmission timer (RFC 6298). Pure; all times are nanoseconds of one clock. */
#ifndef ARBITER_GAP_PREDICTOR_H
#define ARBITER_GAP_PREDICTOR_H

#include <stdbool.h>
#include <stdint.h>

/* Zeroed: no interval seen. */
struct gap_predictor {
    double mean_ns;
    double deviation_ns;
    uint32_t samples;
};

/* Adds one interval. One longer than a second discards what was learned. */
void gap_add(struct gap_predictor *gap, uint64_t sample_ns);

/* An interval began at `since`. True: its end is expected between *from and *until, which are so close together that
 * polling in between pays. False: no prediction; *from and *until are not written. */
bool gap_window(const struct gap_predictor *gap, uint64_t since, uint64_t *from, uint64_t *until);

#endif
