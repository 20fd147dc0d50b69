/*
 * cut.h: a process whose turns the arbiter keeps by taking its channels off the device (VGPU_MSG_CUT). Its launches
 * run ahead as without libvgpu. What it does itself is to say whether it has work: WANT at the first call after it
 * was idle, DONE when nothing is left to do.
 *
 * Idle is a process that made no call for QUIET_NS, and all of whose contexts have reached an event that was
 * recorded since (cuCtxRecordEvent: host callbacks, graphs and waits on memory are before it). While it is off the
 * device the event does not come, so it is not idle. A call that passed by just then is found by looking once more
 * later: see cut.c.
 *
 * A process that is watched also looks once a millisecond, while it is on the device, whether work of its own is
 * unfinished, and counts both in its channel table: one that leaves gaps shares the device with others.
 *
 * Any thread may call these functions; a lock of this file's own guards them.
 */
#ifndef VGPU_CUT_H
#define VGPU_CUT_H

#include <stdbool.h>
#include <stdint.h>

/* From now on the process is cut; again, with other `flags` (enum vgpu_turn_flags). WATCH: it is to say that it idles,
 * with BRIEF sooner. `allow`: launches look at the gate while it is 0. */
void vgpu_cut_begin(uint32_t flags, uint64_t *allow);
void vgpu_cut_end(void);

/* Work comes: says so if the process counts as idle. On every call's path while it does. */
void vgpu_cut_work(void);

/* Does it count as idle? */
bool vgpu_cut_idle(void);

/* Looks whether it idles. Sets *wait_ns: until the next look, or -1. True: it has just become idle. */
bool vgpu_cut_look(int64_t *wait_ns);

/* From half a second after the process was last cut: its channels may be off, and no other process would put them back.
 * Returns nanoseconds until it is to be called again, -1: need not be. */
int64_t vgpu_cut_rescue(void);

void vgpu_cut_reset(void);

#endif
