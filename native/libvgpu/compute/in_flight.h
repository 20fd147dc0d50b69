/*
 * in_flight.h: measures and bounds the work that this process has in flight. Markers (events) are recorded on the
 * streams of its launches, about one for every half window of device time. They show when launches have finished and
 * how long a launch takes, so that the work in flight can be drained soon.
 *
 * Any thread may call these functions. A lock of this file guards the state; it is held over calls of the driver that
 * do not wait, and while vgpu_in_flight_forget waits for the drain thread (drain.h). Times are nanoseconds.
 */
#ifndef VGPU_IN_FLIGHT_H
#define VGPU_IN_FLIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"
#include "lease.h"

enum vgpu_admission { VGPU_ADMIT_GO, VGPU_ADMIT_WAIT, VGPU_ADMIT_STOP };

/*
 * Called before a launch in an open slice that ends in `left_ns` (UINT64_MAX: no end). GO: *batch launches may follow
 * without a check. WAIT: too much is in flight; the caller checks again after *wait_ns. STOP: the work in flight fills
 * the rest of the slice. `first`: the slice had no launch yet, so one launch is admitted, however long it is.
 */
enum vgpu_admission vgpu_in_flight_admit(CUstream stream, int per_thread, const struct vgpu_turn *turn,
                                         uint64_t left_ns, bool first, uint64_t *batch, uint64_t *wait_ns);

enum vgpu_touch { VGPU_TOUCHED, VGPU_TOUCH_NO_CONTEXT, VGPU_TOUCH_NO_MEMORY };

/*
 * Records the context of a launch. NO_CONTEXT: the thread has none (before cuInit, in a forked child), and the driver
 * will refuse the launch. NO_MEMORY: libvgpu has no memory for the record, so the launch must be refused.
 */
enum vgpu_touch vgpu_in_flight_touch(CUstream stream, int per_thread);

/* Records a new context before it has launches. */
void vgpu_in_flight_note(CUcontext context);

/* Returns whether this process has no known context. */
bool vgpu_in_flight_none(void);

/* Makes the next drain wait for all contexts. */
void vgpu_in_flight_use_all(void);

/*
 * Returns how many launches may follow without a check, in any context. Used in a slice without pacing. Makes the next
 * drain wait for all contexts.
 */
uint64_t vgpu_in_flight_free(uint32_t device_count);

/* Returns the devices (bits of the lease) on which this process has launched, to report them to the arbiter. */
uint32_t vgpu_in_flight_declare(void);

/* Has this process launched on a device that was not reported to the arbiter? Its slice may not include that device. */
bool vgpu_in_flight_strays(void);

/*
 * vgpu_drain_begin starts a wait for the work in all contexts that were used since vgpu_in_flight_idle; vgpu_drain_done
 * returns whether that work has finished.
 */
void vgpu_drain_begin(void);
bool vgpu_drain_done(void);

/* Resets the measurement. Called when all work has finished and the slice is over. */
void vgpu_in_flight_idle(void);

/*
 * Called before the driver ends a context: the context's events are not used afterwards. If the context is not ended
 * after all, its next launch records it again.
 */
void vgpu_in_flight_forget(CUcontext context);

#endif
