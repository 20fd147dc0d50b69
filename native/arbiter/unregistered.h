/*
 * unregistered.h: slots of processes that ended before they registered. The arbiter has no pidfd of such a process. The
 * close of its `usage` (usage_guard.h) makes the arbiter look at the slots; a slot that is claimed (VGPU_OWNER_SELF) and has
 * no lock at three looks is cleared.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_UNREGISTERED_H
#define ARBITER_UNREGISTERED_H

#include "leases.h"

/*
 * Looks at the lease's claimed slots; the lease need not be held. Queues the slots of ended processes for
 * unregistered_clear_one. True: a claimed slot has no lock; look again at the next tick (rest.h).
 */
bool unregistered_look(struct lease *lease);

/* Clears one of these slots. False: there was none. */
bool unregistered_clear_one(struct lease *lease);

#endif
