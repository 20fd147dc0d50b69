/*
 * arbiter_link.h: this process's connection to the arbiter. It registers the process, and gives the process its pid on
 * the host. Memory accounting does not need it, because the slot's lock shows that the process lives.
 *
 * Any thread may call these functions except vgpu_link_start, which is called once, with the tenant's lock held.
 */
#ifndef VGPU_LINK_H
#define VGPU_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "in_child.h"
#include "lease.h"

/*
 * The receiver of messages. Only the link's thread calls its functions. Exceptions: vgpu_link_start calls `start`, and
 * `unlinked` if there is no arbiter.
 */
struct vgpu_link_listener {
    /* Called first. `folder` is the lease's folder. Returns false if the lease's limits cannot be mapped. */
    bool (*start)(const char *folder, struct vgpu_usage *usage, uint32_t slot);
    void (*linked)(void); /* called when an arbiter has registered the process */
    /* called when the connection to the arbiter has ended, or if there is no arbiter at the start */
    void (*unlinked)(void);
    void (*message)(const struct vgpu_message *message);
    /*
     * Does the work that is due. Returns the nanoseconds until the next call; -1 if the next call is due only after a
     * message.
     */
    int64_t (*tick)(void);
};

/* Registers a `static const struct vgpu_link_listener`. The library has exactly one. */
#define VGPU_LINK_LISTENER(name) \
    VGPU_RETAINED                \
    __attribute__((section("vgpu_link_listener"))) static const struct vgpu_link_listener *const name##_listed = &name

/*
 * Registers `slot` at <folder>/arbiter.sock; to connect, send and receive, it waits at most VGPU_LINK_WAIT_MS each.
 * Starts the thread that registers again whenever an arbiter comes back. Returns 0; -ESHUTDOWN if the lease is closed;
 * -EIO if its limits cannot be mapped; -EAGAIN if no thread could be started, without which no launch would be
 * admitted. An absent, slow or faulty arbiter is no error, because the limits stay in force.
 */
#define VGPU_LINK_WAIT_MS 200
int vgpu_link_start(const char *folder, struct vgpu_usage *usage, uint32_t slot);

/* Sends a message to the arbiter without waiting. Returns false if there is no arbiter, or it does not read. */
bool vgpu_link_send(const struct vgpu_message *message);

/* Closes the connection to an arbiter that does not answer. The link's thread then registers again. */
void vgpu_link_hang_up(void);

/* Returns whether an arbiter is connected now. */
int vgpu_link_up(void);

/*
 * Is an arbiter connected now? As vgpu_link_up, but asks the kernel, because the link's thread may not have noticed yet
 * that the connection has ended.
 */
bool vgpu_link_lives(void);

/* Returns the pid of this process on the host; getpid() until an arbiter has reported it. */
int32_t vgpu_link_host_pid(void);

#endif
