/*
 * process.h: registered processes, which are watched by a pidfd.
 *
 * Only the event loop's thread may call it. Each look at a lock is charged to the lease (rest.h); a lease whose looks
 * took long several times in a row gets no further looks.
 */
#ifndef ARBITER_PROCESS_H
#define ARBITER_PROCESS_H

#include "lease_record.h"

/*
 * Begins to watch the process of this pidfd, whose pid is `pid`. It must hold the lock of `slot`. Or it must be known
 * there and run the same program, while no other process holds the lock: it has then closed all its files. The caller
 * keeps `pidfd`. Returns the (new or known) process, or NULL with *error set to an errno: ESRCH if the process has
 * ended, EPERM if another process or none holds the slot or this cannot be found out, or an errno of a lack of memory
 * or descriptors.
 */
struct process *process_watch(struct lease *lease, uint32_t slot, int32_t pid, int pidfd, int *error);

/*
 * Called when the process has registered. If the process is still recorded with other slots (it had them before an
 * exec), clears one of them, unless the process holds that slot's lock, and queues looks (looks.h) at the rest.
 */
void process_moved(struct process *now);

/*
 * Called when the connection of the process with this registration number has ended. If the process runs another
 * program after an exec, and does not hold the slot's lock, its slot is cleared. If it has only closed all its files,
 * it keeps its slot. Queues a look (looks.h), and a second one at the next tick (rest.h) if the process keeps its slot
 * at the first.
 */
void process_left(struct lease *lease, uint32_t owner);
void process_look_again(struct lease *lease);

/* Makes one due look at the lease's processes (looks.h). Returns false if none was due. */
bool process_look_at_one(struct lease *lease);

/* Forgets a process without touching its slot. */
void process_forget(struct process *process);

/*
 * Clears the slot if no process holds its lock. Precondition: the lease is held (lease_hold). Returns false if this
 * must be tried again later, for example because the tenant has too many abandoned threads (aside.h).
 */
bool process_clear(struct lease *lease, uint32_t slot);

/* Clears every slot of a new lease that has an owner but no process with its lock. */
void process_sweep(struct lease *lease);

/*
 * After a restart of the arbiter: watches every process that holds a lock of this lease's slots and can belong to the
 * lease. The check is needed because a lock gives only a pid.
 */
void process_adopt_all(struct lease *lease);

#endif
