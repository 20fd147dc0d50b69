/*
 * looks.h: leases of which something is to be looked at (aside.h), in turns: one look in a turn of the loop (loop.h), and
 * one of each such lease before the second of any. However many processes of a tenant end at once, another tenant's
 * message waits for one look.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_LOOKS_H
#define ARBITER_LOOKS_H

#include "leases.h"

/* `look_at_one` makes one of the looks that the lease is due; false: none was. Call once, after loop_open.
 * 0 or -errno. */
int looks_open(bool (*look_at_one)(struct lease *lease));

/* A look at the lease is due. */
void looks_add(struct lease *lease);

/* The lease is about to go. */
void looks_forget(struct lease *lease);

#endif
