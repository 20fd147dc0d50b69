/*
 * register.h: the tenants' connections. Every received byte is hostile input.
 */
#ifndef ARBITER_REGISTER_H
#define ARBITER_REGISTER_H

#include "lease_record.h"

/*
 * Accepts a connection, and closes it at once if the lease has too many, its rate is used up, the peer is not
 * identified, or memory or descriptors are short. Called when the listener of a lease is readable.
 */
void register_accept(struct source *source, uint32_t events);

void connection_close(struct connection *connection);

#endif
