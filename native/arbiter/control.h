/*
 * control.h: the socket, for root only, on which vgpud names the leases to serve.
 *
 * Only the event loop's thread may call it.
 */
#ifndef ARBITER_CONTROL_H
#define ARBITER_CONTROL_H

/* Listens on `path`, for root and the arbiter's own user. Precondition: leases_open was called. Returns 0 or -errno. */
int control_open(const char *path);

#endif
