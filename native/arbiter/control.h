/*
 * control.h: the root-only socket on which vgpud names the leases to serve.
 *
 * One thread: the loop's.
 */
#ifndef ARBITER_CONTROL_H
#define ARBITER_CONTROL_H

/* Listens on `path`, for root and the arbiter's own user. Precondition: leases_open. 0 or -errno. */
int control_open(const char *path);

#endif
