/*
 * source.h: memory that the driver holds for this process, and reports by a call: pools, graphs. Each kind of it has a
 * source, which is asked before the ledger is compared with NVML.
 *
 * Any thread may call a source's functions, several at once: a source has a lock of its own. They call the driver.
 */
#ifndef VGPU_SOURCE_H
#define VGPU_SOURCE_H

#include <stdbool.h>

#include "in_child.h"

struct vgpu_source {
    /* Charges the memory that the driver holds on a device (index in the lease) now. True: it had not changed. */
    bool (*settle)(int device);
    /* Makes the driver free unused memory. True: some was freed. May be NULL. */
    bool (*give_back)(int device);
};

/* Makes a `static const struct vgpu_source` known. */
#define VGPU_SOURCE(source) \
    VGPU_RETAINED           \
    __attribute__((section("vgpu_sources"))) static const struct vgpu_source *const source##_listed = &source

/* The same for all sources. */
bool vgpu_sources_settle(int device);
bool vgpu_sources_give_back(int device);

#endif
