#include "gap_predictor.h"

#define MEAN_GAIN 0.125
#define DEVIATION_GAIN 0.25
#define SAMPLES_MIN 4
#define SAMPLE_MAX_NS 1000000000u /* longer is no interval of a cycle: the work has ended */
#define LEAD_NS 60000.0           /* the longest usual wake-up latency of a thread */
#define WIDTH_MAX 0.3             /* of the mean: bounds the part of a core spent polling */

void gap_add(struct gap_predictor *gap, uint64_t sample_ns)
{
    double sample = (double)sample_ns;
    if (sample_ns > SAMPLE_MAX_NS) {
        gap->samples = 0;
        return;
    }
    if (gap->samples == 0) {
        gap->mean_ns = sample;
        gap->deviation_ns = sample / 2;
    }
    double off = sample - gap->mean_ns;
    gap->deviation_ns += DEVIATION_GAIN * ((off < 0 ? -off : off) - gap->deviation_ns);
    gap->mean_ns += MEAN_GAIN * off;
    gap->samples += gap->samples < SAMPLES_MIN;
}

bool gap_window(const struct gap_predictor *gap, uint64_t since, uint64_t *from, uint64_t *until)
{
    double around = 2 * gap->deviation_ns + LEAD_NS;
    if (gap->samples < SAMPLES_MIN || 2 * around > WIDTH_MAX * gap->mean_ns)
        return false;
    *from = since + (uint64_t)(gap->mean_ns - around);
    *until = since + (uint64_t)(gap->mean_ns + around);
    return true;
}
