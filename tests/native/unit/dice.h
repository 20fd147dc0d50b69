/* dice.h: pseudorandom numbers for the scheduler's models, the same for each run of a seed. */
#ifndef VGPU_TEST_DICE_H
#define VGPU_TEST_DICE_H

#include <stdint.h>

static unsigned seed; /* set before the first call */

/* Returns 0 to sides - 1. */
static inline unsigned dice(unsigned sides)
{
    static uint64_t state;
    if (state == 0)
        state = seed * 2862933555777941757ull + 3037000493ull;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned)(state >> 33) % sides;
}

#endif
