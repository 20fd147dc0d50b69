/*
 * register.h: tenants' connections. Every byte that comes in is hostile.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_REGISTER_H
#define ARBITER_REGISTER_H

#include "leases.h"

/* The listener of a lease is readable. */
void register_accept(struct source *source, uint32_t events);

void connection_close(struct connection *connection);

#endif
