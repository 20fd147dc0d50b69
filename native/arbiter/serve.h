/* serve.h: starts and stops serving a lease: its files, its socket, its live processes. Only one thread may call it. */
#ifndef ARBITER_SERVE_H
#define ARBITER_SERVE_H

#include "lease_record.h"

/*
 * Can this be the name of a folder under leases/? It has 1 to 63 letters, digits, '.', '_' and '-', and no leading dot.
 */
bool lease_id_valid(const char id[VGPU_ID_BYTES]);

/*
 * Serves leases/<id>: opens its files, binds its socket, clears the slots of dead processes and adopts live ones. If
 * the lease is served already, it reads the limits again, follows a move to other devices, and starts again if the
 * folder was replaced. Preconditions: lease_id_valid(id), and leases_open was called. Returns 0, or -errno if the lease
 * is not served.
 */
int lease_add(const char *id);

/*
 * Listens on the lease's socket once it is bound, and binds it if no thread does. Returns false if it must be called
 * again later.
 */
bool lease_listen(struct lease *lease);

/* Stops serving a lease. Its processes and folder stay as they are. Returns 0 or -ENOENT. */
int lease_remove(const char *id);

/* Reads the limits of the lease again, and sends LOOK to each of its connected processes. Returns 0 or -ENOENT. */
int lease_look(const char *id);

/* Fills `list` with the lease's live registered processes, and with its status (lease.h). Returns 0 or -ENOENT. */
int lease_list(const char *id, struct vgpu_process_list *list);

/*
 * At start: calls leases_open, and serves each lease in leases/. Returns the number of leases that cannot be served, or
 * 1 if leases/ cannot be read.
 */
int lease_scan(int leases_fd);

#endif
