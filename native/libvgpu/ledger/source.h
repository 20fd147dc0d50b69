/*
 * source.h: memory that the driver holds for this process and reports by a call, such as pools and graphs. Each kind of
 * such memory has a source, which is asked before the ledger is compared with NVML.
 *
 * Any thread may call a source's functions, several at the same time: a source has its own lock. `settle` and
 * `give_back` call the driver.
 */
#ifndef VGPU_SOURCE_H
#define VGPU_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "in_child.h"
#include "lease.h"

struct vgpu_source {
    /*
     * Charges the memory that the driver holds on a device (index in the lease) now. Returns true if it had not
     * changed.
     */
    bool (*settle)(int device);
    /* Makes the driver free unused memory. Returns true if some was freed. May be NULL. */
    bool (*give_back)(int device);
    /* Bytes charged on all devices. */
    uint64_t (*charged)(void);
    enum vgpu_stay kind;
};

/* Registers a `static const struct vgpu_source`. */
#define VGPU_SOURCE(source) \
    VGPU_RETAINED           \
    __attribute__((section("vgpu_sources"))) static const struct vgpu_source *const source##_listed = &source

/* Call `settle`, or `give_back`, of every source. Return true if no source had changed, or if some memory was freed. */
bool vgpu_sources_settle(int device);
bool vgpu_sources_give_back(int device);

/* Adds what each source has charged to the entry of its kind. */
void vgpu_sources_add(uint64_t by_kind[VGPU_STAY_KINDS]);

#endif
