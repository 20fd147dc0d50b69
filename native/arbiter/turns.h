/*
 * turns.h: time slices over the tenants' connections: passes messages to the scheduler, and sends its answers.
 *
 * One thread: the loop's. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_TURNS_H
#define ARBITER_TURNS_H

#include "leases.h"

/* Opens the timer. `run_fd`, `control_device`: see cut.h. 0 or -errno. */
int turns_open(int run_fd, const char *control_device);

/* A lease was added, has changed, or is removed. A lease whose limits cannot be read takes no part. */
void turns_lease_add(struct lease *lease);
void turns_lease_refresh(struct lease *lease);
void turns_lease_remove(struct lease *lease);

/*
 * turns_lease_moved: is the lease for other devices than before? turns_lease_follow: follows the move, with its
 * counters. Precondition: its connections are closed.
 */
bool turns_lease_moved(const struct lease *lease);
void turns_lease_follow(struct lease *lease);

/* Called before its files are closed: publishes its unpublished counters. */
void turns_lease_settle(struct lease *lease);

/* The connection's process has registered; the connection has ended. Both may be called again. */
void turns_join(struct connection *connection);
void turns_leave(struct connection *connection);

/* Sends LOOK to the connection's process. */
void turns_look(struct connection *connection);

/* Handles WANT, DONE or CHANNELS of a connection. False: the connection is invalid and must be closed. */
bool turns_message(struct connection *connection, const struct vgpu_message *message);

#endif
