/*
 * unregistered.h: clears slots of processes that ended before they registered. The arbiter has no pidfd of such a
 * process. When the process's `usage` file is closed (usage_guard.h), the arbiter looks at the slots. A slot that is
 * claimed (VGPU_OWNER_SELF) and has no lock at three looks is cleared.
 *
 * Only the event loop's thread may call it.
 */
#ifndef ARBITER_UNREGISTERED_H
#define ARBITER_UNREGISTERED_H

#include "lease_record.h"

/*
 * Looks at the lease's claimed slots; the lease need not be held. Queues the slots of ended processes for
 * unregistered_clear_one. Returns true if the next tick must look again (rest.h): a claimed slot has no lock, also while
 * its process is dying, or the look did not end.
 */
bool unregistered_look(struct lease *lease);

/* Clears one of the queued slots; if that fails, the next tick tries again. Returns false if none is queued. */
bool unregistered_clear_one(struct lease *lease);

#endif
