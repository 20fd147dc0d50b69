/*
 * cut.h: a process under the engine cut: the arbiter enforces its slices by disabling its channels (VGPU_MSG_CUT). Its
 * launches run as without libvgpu. The process only reports whether it has work: WANT at the first call after it was
 * idle, DONE when no work is left.
 *
 * A process is idle if it made no call for a time that adapts to it (quiet_ns), and all of its contexts have reached an
 * event that was recorded since then (cuCtxRecordEvent: host callbacks, graphs and waits on memory come before it).
 * While the process is off the device the event does not complete, so the process is not idle. A call that begins while
 * the process is being reported as idle is found by a later check: see cut.c.
 *
 * While it is on the device, a watched process also checks, at most once per millisecond, whether its work is
 * unfinished, and counts both results in its channel table: a process with gaps shares the device with others.
 *
 * Any thread may call these functions; a lock of this file guards the state.
 */
#ifndef VGPU_CUT_H
#define VGPU_CUT_H

#include <stdbool.h>
#include <stdint.h>

/*
 * vgpu_cut_begin: from now on the process is under the engine cut, or gets other `flags` (enum vgpu_turn_flags). WATCH:
 * it must report when it is idle, with BRIEF sooner. `allow`: launches check the gate while this word is 0.
 */
void vgpu_cut_begin(uint32_t flags, uint64_t *allow);
void vgpu_cut_end(void);

/* Reports work to the arbiter if the process counts as idle. Wrapped driver calls call it while the process is idle. */
void vgpu_cut_work(void);

/* Returns whether the process counts as idle. */
bool vgpu_cut_idle(void);

/*
 * Checks for idleness. Sets *wait_ns to the time until the next check; -1 if no check is needed. Returns true if the
 * process has just become idle.
 */
bool vgpu_cut_look(int64_t *wait_ns);

/*
 * Starts the rescue: it enables the process's channels if they have been disabled for half a second without an arbiter,
 * or after the engine cut has ended for the process. The rescue has a thread that calls no function of libcuda, because
 * every other thread, also the link's, may wait inside one until the process is on the device. With `starts` the thread
 * is started if there is none; while there is none, each call of this function does the thread's work. Only the link's
 * thread may call this.
 */
void vgpu_cut_guard(bool starts);

void vgpu_cut_reset(void);

#endif
