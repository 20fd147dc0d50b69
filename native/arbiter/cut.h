/*
 * cut.h: the engine cut. It enforces time slices by disabling the channels of tenants (channels.h), in the middle of a
 * kernel if needed. It follows the scheduler's decisions which tenant holds a device.
 *
 * A tenant is off a device with time slices while it holds no slice there and either another tenant has work or its own
 * limit is hard. It stays on while it backfills another's slice (backfill.h). A tenant of a positive priority stays on
 * while its share is not used up, so that its next launch waits only until the other tenants are off.
 *
 * One thread: the loop's. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_CUT_H
#define ARBITER_CUT_H

#include <stdbool.h>
#include <stdint.h>

#include "leases.h"

/*
 * `run_fd`: the run folder, where the first word of engines/<UUID> is the engine of a device; without the file it is
 * the gate. `control_device`: path. `changed` is called when the scheduler must decide again. Returns 0 or -errno;
 * after an error no device has this engine.
 */
int cut_open(int run_fd, const char *control_device, void (*changed)(void));

/*
 * cut_lease_add: the scheduler knows the lease's tenant. cut_lease_remove: enables what is disabled, and forgets the
 * tenant.
 */
void cut_lease_add(struct lease *lease);
void cut_lease_remove(struct lease *lease);

/*
 * Has the driver refused orders for the lease, and is the lease enabled on all of its devices again? Its gate then
 * enforces its slices.
 */
bool cut_refused(const struct lease *lease);

/* Is the lease paused, and are all of its processes off all of its devices? */
bool cut_paused(const struct lease *lease);

/* Iterates over the leases with this engine: NULL begins and ends. */
struct lease *cut_lease_next(const struct lease *lease);

/* A process has registered, or its channels have changed. */
void cut_lease_stale(struct lease *lease);

/* Devices on which the process of this slot has channels, as bits of the lease. */
uint32_t cut_devices(struct lease *lease, uint32_t slot);

/* Submits the orders that follow from the scheduler's decisions. Returns when to call again, at the latest. */
uint64_t cut_follow(uint64_t now);

#endif
