/*
 * cut.h: the engine cut. It enforces time slices by disabling the channels of tenants (channels.h), in the middle of a
 * kernel if needed. It follows the scheduler's decisions on which tenant holds a device.
 *
 * A tenant's channels are disabled on a device with time slices after its slice there has ended, and while it holds no
 * slice there and either another tenant has work or its own limit is hard. They stay enabled while the tenant backfills
 * another's slice or lingers (backfill.h), is the next holder, or is suspended without work. An idle tenant of a
 * positive priority stays enabled while its share is not used up, so that its next launch need not wait for a call that
 * enables them. A paused tenant's channels are disabled, unless the engine cut was given up for that tenant.
 *
 * Only the event loop's thread may call these functions. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_CUT_H
#define ARBITER_CUT_H

#include <stdbool.h>
#include <stdint.h>

#include "lease_record.h"

/*
 * Starts the engine cut. `run_fd` is the run folder. The first word of its file engines/<UUID> names the engine of a
 * device; a device without the file has the gate. `control_device` is a path. `changed` is called when the scheduler
 * must decide again. Returns 0 or -errno; after an error no device has this engine.
 */
int cut_open(int run_fd, const char *control_device, void (*changed)(void));

/*
 * cut_lease_add: from now on the engine disables and enables the channels of the lease's tenant, if all of its devices
 * have the engine cut and memory suffices. Precondition: sched_tenant_add has added the tenant. cut_lease_remove ends
 * this, and enables the channels that are disabled.
 */
void cut_lease_add(struct lease *lease);
void cut_lease_remove(struct lease *lease);

/*
 * Returns true if the arbiter has given up the engine cut for the lease (after refusals of the driver, an order that
 * hangs, or a false table), and the orders that enable its channels again have ended on all of its devices. The gate
 * then enforces its time slices.
 */
bool cut_refused(const struct lease *lease);

/* Returns whether the lease is paused and the channels of all its processes are disabled on all its devices. */
bool cut_paused(const struct lease *lease);

/*
 * Returns the lease with the engine cut that follows `lease`: NULL gives the first, and NULL is returned after the
 * last.
 */
struct lease *cut_lease_next(const struct lease *lease);

/* Records that a process of the lease has registered, or that its channels have changed. */
void cut_lease_stale(struct lease *lease);

/*
 * Reports the load of a tenant that is about to be idle to the scheduler (sched_note_load), unless its load was read
 * less than LOAD_AGAIN_NS ago.
 */
void cut_note_load(struct lease *lease, uint64_t now);

/*
 * Returns the devices on which the process of this slot has channels, as bits by ordinal in the lease; 0 unless all
 * devices of the lease have the engine cut. The lease's token bucket pays for the reading (rest.h).
 */
uint32_t cut_devices(struct lease *lease, uint32_t slot);

/*
 * Submits the orders that follow from the scheduler's decisions, ends the slices whose channels are off, and reads the
 * load samples that are due. Returns the latest time of the next call.
 */
uint64_t cut_follow(uint64_t now);

#endif
