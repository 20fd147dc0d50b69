/*
 * in_flight.h: how much work this process has in flight. Markers (events) are recorded on the streams that it
 * launches to, about one for every half window of device time; they tell when launches have run and how
 * long one takes, so that no more is in flight than can be drained soon.
 *
 * Any thread may call these functions; a lock of this file's own guards them, and is held over calls of the driver
 * that do not wait. Times are nanoseconds.
 */
#ifndef VGPU_IN_FLIGHT_H
#define VGPU_IN_FLIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"
#include "lease.h"

enum vgpu_admission { VGPU_ADMIT_GO, VGPU_ADMIT_WAIT, VGPU_ADMIT_STOP };

/*
 * Before a launch in an open turn that ends in `left_ns` (UINT64_MAX: open-ended). GO: *batch launches may
 * follow without a look. WAIT: too much is in flight; look again after *wait_ns. STOP: what is in flight
 * fills the rest of the turn. `first`: nothing was launched in this turn, so one launch goes whatever it takes.
 */
enum vgpu_admission vgpu_in_flight_admit(CUstream stream, int per_thread, const struct vgpu_turn *turn,
                                         uint64_t left_ns, bool first, uint64_t *batch, uint64_t *wait_ns);

/* After the launch, which still counts as asked: marks its end if launches are long. */
void vgpu_in_flight_mark_after(CUstream stream, int per_thread, uint64_t weight);

enum vgpu_touch { VGPU_TOUCHED, VGPU_TOUCH_NO_CONTEXT, VGPU_TOUCH_NO_MEMORY };

/* Notes the context of a launch. NO_CONTEXT: the thread has none (before cuInit, in a forked child), and the driver will
 * refuse the launch. NO_MEMORY: libvgpu has no memory to note it; the launch must be refused. */
enum vgpu_touch vgpu_in_flight_touch(CUstream stream, int per_thread);

/* Takes note of a context that was made: before anything is launched to it. */
void vgpu_in_flight_note(CUcontext context);

/* Is no context known? */
bool vgpu_in_flight_none(void);

/* The next drain is one of all contexts. */
void vgpu_in_flight_use_all(void);

/* While no limit holds for this process: how many launches may follow without a look, to any context. */
uint64_t vgpu_in_flight_free(uint32_t device_count);

/* Devices (bits of the lease) on which this process has launched, to tell the arbiter. */
uint32_t vgpu_in_flight_declare(void);

/* Has it launched on one that the arbiter was not told of? Its turn may not be one on that. */
bool vgpu_in_flight_strays(void);

/* Begins to wait for everything that was launched; then asks whether it has run. */
void vgpu_drain_begin(void);
bool vgpu_drain_done(void);

/* Everything has run, and the turn is over. */
void vgpu_in_flight_idle(void);

/* The context is about to end, and its events with it: none of them is used after this. Called before the driver ends
 * it; where it lives on, the next launch to it notes it again. */
void vgpu_in_flight_forget(CUcontext context);

#endif
