/* process.h: from a pid to a watched process. */
#ifndef ARBITER_PROCESS_H
#define ARBITER_PROCESS_H

#include "served.h"

/*
 * Watches the process that holds the lock of `slot`, if that is `pid`. The pidfd is opened first and
 * the lock looked at after: the kernel says that the holder lives, so a pid that was used anew in
 * between cannot pass. Returns the (new or known) process, or NULL with *error set to an errno.
 */
struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int *error);

/* Forgets a process without touching its slot. */
void process_forget(struct process *process);

/* Clears every slot that is owned but whose lock nobody holds, and forgets processes that live on without
 * one: exec and close-everything drop the lock but not the process. One that is dying is left to its pidfd. */
void process_sweep(struct lease *lease);

/* Watches every process that holds a lock of this lease's slots (after a restart). */
void process_adopt_all(struct lease *lease);

#endif
