/* control.h: the root-only socket on which vgpud names the leases to serve. */
#ifndef ARBITER_CONTROL_H
#define ARBITER_CONTROL_H

/* Listens on `path`; leases are folders under leases_fd. 0 or -errno. */
int control_open(const char *path, int leases_fd);

#endif
