/* lull.h: when something that comes again and again comes next: its mean distance and deviation, as TCP has its
 * retransmission timer (RFC 6298). */
#ifndef ARBITER_LULL_H
#define ARBITER_LULL_H

#include <stdbool.h>
#include <stdint.h>

struct lull {
    double mean_ns;
    double deviation_ns;
    uint32_t samples;
};

void lull_add(struct lull *lull, uint64_t sample_ns);

/* It began at `since`: true, if its end can be foretold so well that it pays to look out for it without
 * sleeping, from *from until *until; false: it comes as a surprise. */
bool lull_window(const struct lull *lull, uint64_t since, uint64_t *from, uint64_t *until);

#endif
