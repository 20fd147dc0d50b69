/*
 * turns.h: compute turns over the tenants' connections: what comes in goes to the scheduler, and its answers go out.
 *
 * One thread: the loop's. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_TURNS_H
#define ARBITER_TURNS_H

#include "leases.h"

/* Opens the timer. `run_fd`, `control_device`: see cut.h. 0 or -errno. */
int turns_open(int run_fd, const char *control_device);

/* A lease came, is changed, or goes. A lease whose limits cannot be read takes no part. */
void turns_lease_add(struct lease *lease);
void turns_lease_refresh(struct lease *lease);
void turns_lease_remove(struct lease *lease);

/* Is it for other devices than before? If so: follows them, with its counters. Connections are closed before. */
bool turns_lease_moved(const struct lease *lease);
void turns_lease_follow(struct lease *lease);

/* Its files are about to be closed: publishes what is not yet. */
void turns_lease_settle(struct lease *lease);

/* The connection's process is registered; its connection ends. Both may come again. */
void turns_join(struct connection *connection);
void turns_leave(struct connection *connection);

/* Says LOOK to the connection's process. */
void turns_look(struct connection *connection);

/* WANT, DONE or CHANNELS of a connection. False: the connection is of no use and is to be closed. */
bool turns_message(struct connection *connection, const struct vgpu_message *message);

#endif
