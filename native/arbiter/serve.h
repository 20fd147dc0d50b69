/* serve.h: starts and stops serving a lease: its files, its socket, its live processes. One thread. */
#ifndef ARBITER_SERVE_H
#define ARBITER_SERVE_H

#include "leases.h"

/* Can this be the name of a folder under leases/? Letters, digits, '.', '_' and '-', no leading dot. */
bool lease_id_valid(const char id[VGPU_ID_BYTES]);

/*
 * Serves leases/<id>: opens its files, binds its socket, clears the slots of dead processes and adopts live ones. If it
 * is served already: reads its limits again, follows a move to other devices, and restarts if its folder was replaced.
 * Preconditions: lease_id_valid(id), leases_open. Returns 0, or -errno if it is not served.
 */
int lease_add(const char *id);

/* Stops serving; processes and the folder stay as they are. 0 or -ENOENT. */
int lease_remove(const char *id);

/* Sends LOOK to each registered process of the lease; 0 or -ENOENT. */
int lease_look(const char *id);

/* Fills `list` with the lease's registered processes; 0 or -ENOENT. */
int lease_list(const char *id, struct vgpu_process_list *list);

/* Serves each folder of leases/, at start; calls leases_open. Returns the number of leases that cannot be served. */
int lease_scan(int leases_fd);

#endif
