/*
 * cut.h: a process under the engine cut: the arbiter enforces its slices by disabling its channels (VGPU_MSG_CUT). Its
 * launches run as without libvgpu. The process only reports whether it has work: WANT at the first call after it was
 * idle, DONE when no work is left.
 *
 * A process is idle if it made no call for QUIET_NS, and all of its contexts have reached an event recorded since
 * (cuCtxRecordEvent: host callbacks, graphs and waits on memory come before it). While the process is off the device
 * the event does not complete, so it is not idle. A call that comes at that moment is found by a later check: see
 * cut.c.
 *
 * A watched process also checks once a millisecond, while it is on the device, whether its work is unfinished, and
 * counts both results in its channel table: a process with gaps shares the device with others.
 *
 * Any thread may call these functions; a lock of this file's own guards them.
 */
#ifndef VGPU_CUT_H
#define VGPU_CUT_H

#include <stdbool.h>
#include <stdint.h>

/*
 * vgpu_cut_begin: the process is under the engine cut from now on, or gets other `flags` (enum vgpu_turn_flags). WATCH:
 * it must report when it is idle, with BRIEF sooner. `allow`: launches check the gate while it is 0.
 */
void vgpu_cut_begin(uint32_t flags, uint64_t *allow);
void vgpu_cut_end(void);

/* Reports work if the process counts as idle. It is on every call's path while the process is idle. */
void vgpu_cut_work(void);

/* Does it count as idle? */
bool vgpu_cut_idle(void);

/* Checks for idleness. Sets *wait_ns to the time until the next check, or -1. True: it has just become idle. */
bool vgpu_cut_look(int64_t *wait_ns);

/*
 * The rescue: enables the process's channels where they have been disabled for half a second without an arbiter, or
 * after the engine cut has ended for the process. It has a thread, which calls no function of libcuda: every other
 * thread, the link's as well, may wait in one until the process is on the device. With `starts` the thread is started,
 * if there is none; while the system has none to give, each call does its work. Called by the link's thread only.
 */
void vgpu_cut_guard(bool starts);

void vgpu_cut_reset(void);

#endif
