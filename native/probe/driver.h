/* driver.h: the driver's functions, looked up in the way that the command line selects. */
#ifndef PROBE_DRIVER_H
#define PROBE_DRIVER_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <stdbool.h>

enum way { WAY_DIRECT, WAY_DLSYM, WAY_PROC_ADDRESS };

struct driver {
#define SYMBOL(name) __typeof__(&name) name;
#include "symbols.def"
#undef SYMBOL
};

extern struct driver cu;

/* Fills in `cu`. Returns false, with a line on stderr, if the driver or one of its functions does not exist. */
bool driver_load(enum way way);

#endif
