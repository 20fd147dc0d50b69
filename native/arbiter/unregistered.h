/*
 * unregistered.h: slots of processes that ended before they registered. The arbiter has no pidfd of such a process, so
 * it learns of the end by the close of the process's `usage` (usage_guard.h), and from the slots: one that was claimed
 * (VGPU_OWNER_SELF) and has no lock is cleared.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_UNREGISTERED_H
#define ARBITER_UNREGISTERED_H

#include "leases.h"

/*
 * Looks at the lease's claimed slots, whatever holds its files. Those whose process has ended are to be cleared (looks.h).
 * True: there are slots without a lock that are to be looked at again with the next tick (rest.h).
 */
bool unregistered_look(struct lease *lease);

/* Clears one of these slots. False: there was none. */
bool unregistered_clear_one(struct lease *lease);

#endif
