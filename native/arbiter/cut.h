/*
 * cut.h: the engine that keeps turns by taking tenants off their devices (channels.h), in the middle of whatever
 * they run. The scheduler says which tenant holds a device; here each entity is put on its device or taken off it
 * accordingly.
 *
 * A tenant is off a device with time slices while it holds no slice there and either another tenant has work or
 * its own limit is hard. It stays on while it backfills another's slice (backfill.h). A tenant of a positive priority
 * stays on while its share is not used up, so that its next launch waits only until the other tenants are off.
 *
 * One thread: the loop's. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_CUT_H
#define ARBITER_CUT_H

#include <stdbool.h>
#include <stdint.h>

#include "leases.h"

/* `run_fd`: the run folder, where engines/<UUID> says by its first word which engine a device has; without it
 * there, the device has the gate. `control_device`: path. `changed` is called when the scheduler is to look
 * again. 0 or -errno: then no device has this engine. */
int cut_open(int run_fd, const char *control_device, void (*changed)(void));

/* The lease's tenant is known to the scheduler; it is forgotten: what is off is put back. */
void cut_lease_add(struct lease *lease);
void cut_lease_remove(struct lease *lease);

/* The driver refused an order for it for good, and it was put back on its devices: it is to be gated. */
bool cut_refused(const struct lease *lease);

/* The leases with this engine, one after the other: NULL begins and ends. */
struct lease *cut_lease_next(const struct lease *lease);

/* A process came, or its channels are others. */
void cut_lease_stale(struct lease *lease);

/* Devices on which the process of this slot has channels, as bits of the lease. */
uint32_t cut_devices(struct lease *lease, uint32_t slot);

/* Gives the orders that follow from what the scheduler last said. Returns when to call again, at the latest. */
uint64_t cut_follow(uint64_t now);

#endif
