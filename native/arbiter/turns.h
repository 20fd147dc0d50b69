/*
 * turns.h: time slices over the tenants' connections: passes messages to the scheduler, and sends its answers.
 *
 * Only the event loop's thread may call it. Times are nanoseconds of CLOCK_MONOTONIC.
 */
#ifndef ARBITER_TURNS_H
#define ARBITER_TURNS_H

#include "lease_record.h"

/* Opens the timer. `run_fd` and `control_device` are as in cut.h. Returns 0 or -errno. */
int turns_open(int run_fd, const char *control_device);

/*
 * Called when a lease was added, has changed, or is removed. A lease gets no time slices before its limits can be read.
 */
void turns_lease_add(struct lease *lease);
void turns_lease_refresh(struct lease *lease);
void turns_lease_remove(struct lease *lease);

/*
 * turns_lease_moved: is the lease for other devices than before? turns_lease_follow: follows the move, and keeps the
 * counters. Precondition: the lease's connections are closed.
 */
bool turns_lease_moved(const struct lease *lease);
void turns_lease_follow(struct lease *lease);

/* Publishes the lease's unpublished counters. Called before its files are closed. */
void turns_lease_settle(struct lease *lease);

/*
 * Called when the connection's process has registered (turns_join), or when the connection has ended (turns_leave).
 * Both may be called again.
 */
void turns_join(struct connection *connection);
void turns_leave(struct connection *connection);

/* Sends LOOK to the connection's process. */
void turns_look(struct connection *connection);

/*
 * Handles a WANT, DONE, ENDING or CHANNELS message of a connection. Returns false if its process is not known to the
 * scheduler (turns_join); the connection must then be closed.
 */
bool turns_message(struct connection *connection, const struct vgpu_message *message);

#endif
