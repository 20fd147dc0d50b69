#include "lull.h"

#define MEAN_GAIN 0.125
#define DEVIATION_GAIN 0.25
#define SAMPLES_MIN 4
#define SAMPLE_MAX_NS 1000000000u /* longer is not a lull but the end of the work */
#define LEAD_NS 60000.0           /* of one who wakes late */
#define WIDTH_MAX 0.3             /* of the mean: so much of a core at most */

void lull_add(struct lull *lull, uint64_t sample_ns)
{
    double sample = (double)sample_ns;
    if (sample_ns > SAMPLE_MAX_NS) {
        lull->samples = 0;
        return;
    }
    if (lull->samples == 0) {
        lull->mean_ns = sample;
        lull->deviation_ns = sample / 2;
    }
    double off = sample - lull->mean_ns;
    lull->deviation_ns += DEVIATION_GAIN * ((off < 0 ? -off : off) - lull->deviation_ns);
    lull->mean_ns += MEAN_GAIN * off;
    lull->samples += lull->samples < SAMPLES_MIN;
}

bool lull_window(const struct lull *lull, uint64_t since, uint64_t *from, uint64_t *until)
{
    double around = 2 * lull->deviation_ns + LEAD_NS;
    if (lull->samples < SAMPLES_MIN || 2 * around > WIDTH_MAX * lull->mean_ns)
        return false;
    *from = since + (uint64_t)(lull->mean_ns - around);
    *until = since + (uint64_t)(lull->mean_ns + around);
    return true;
}
