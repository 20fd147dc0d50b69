/*
 * control.h: the socket on which vgpud tells the arbiter which leases to serve. Only root and the arbiter's own user
 * may connect.
 *
 * Only the event loop's thread may call control_open.
 */
#ifndef ARBITER_CONTROL_H
#define ARBITER_CONTROL_H

/* Listens on `path`. Precondition: leases_open was called. Returns 0 or -errno. */
int control_open(const char *path);

#endif
