/* allocate.h: allocates device memory by any family of calls. */
#ifndef PROBE_ALLOCATE_H
#define PROBE_ALLOCATE_H

#include <stdbool.h>
#include <stdint.h>

#include "driver.h"

struct piece {
    uint64_t handle;
    uint64_t bytes;
};

/* Returns whether piece_make knows this family of calls. */
bool family_known(const char *family);

CUresult piece_make(const char *family, uint64_t bytes, int device, struct piece *piece);
CUresult piece_drop(const char *family, const struct piece *piece);

#endif
