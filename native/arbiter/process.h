/*
 * process.h: from a pid to a watched process.
 *
 * One thread: the loop's. Each look at a lock is charged to the lease (rest.h), and a lease that was charged too much
 * is looked at no more.
 */
#ifndef ARBITER_PROCESS_H
#define ARBITER_PROCESS_H

#include "leases.h"

/*
 * Watches the process of this pidfd, whose number is `pid` while it lives, if it holds the lock of `slot`, or is known
 * there, runs the same program still and no other holds the lock: it closed all its files. `pidfd` stays
 * the caller's. Returns the (new or known) process, or NULL with *error set to an errno: ESRCH, it is gone; EPERM,
 * another process holds the slot, or none.
 */
struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int pidfd, int *error);

/* This process has registered. Clears one slot that it had before an exec, and queues looks (looks.h) at its other former
 * slots. */
void process_moved(struct process *now);

/* The connection of the process with this registration number has ended. Where it lives on without the slot's lock as
 * another program, after an exec, its slot is cleared. Where it has only closed all its files it keeps its slot. Queues a
 * look (looks.h), and a second one at the next tick (rest.h) if the process still holds the lock. */
void process_left(struct lease *lease, uint32_t owner);
void process_look_again(struct lease *lease);

/* Makes one of the looks at the lease's processes that are due (looks.h). False: none was. */
bool process_look_at_one(struct lease *lease);

/* Forgets a process without touching its slot. */
void process_forget(struct process *process);

/* Clears the slot if no process holds its lock. Precondition: the lease is held (lease_hold). */
void process_clear(struct lease *lease, uint32_t slot);

/* Clears every slot that is owned but whose lock no process holds, of a lease that is served from now on. */
void process_sweep(struct lease *lease);

/* Watches every process that holds a lock of this lease's slots and may be one of its own (after a restart): a lock says
 * no more than a number. */
void process_adopt_all(struct lease *lease);

#endif
