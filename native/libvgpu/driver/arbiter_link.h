/*
 * arbiter_link.h: this process's line to the arbiter. Memory accounting does not need it (the slot's lock
 * says that the process lives); the line tells the arbiter of the process, and the process its pid on the host.
 *
 * Any thread may call the functions but vgpu_link_start, which is called once, with the tenant's lock held.
 */
#ifndef VGPU_LINK_H
#define VGPU_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "in_child.h"
#include "lease.h"

/* What the messages are for. Every function but `start` is called by the link's thread. */
struct vgpu_link_listener {
    /* Before any other. `folder`: of the lease. False: the lease's limits cannot be mapped. */
    bool (*start)(const char *folder, struct vgpu_usage *usage, uint32_t slot);
    void (*linked)(void);   /* an arbiter has registered the process */
    void (*unlinked)(void); /* the arbiter is gone, or was not there at the start */
    void (*message)(const struct vgpu_message *message);
    /* Returns the nanoseconds until it is to be called again, or -1: only after a message. */
    int64_t (*tick)(void);
};

/* Makes a `static const struct vgpu_link_listener` known: exactly one in the library. */
#define VGPU_LINK_LISTENER(name) \
    VGPU_RETAINED                \
    __attribute__((section("vgpu_link_listener"))) static const struct vgpu_link_listener *const name##_listed = &name

/*
 * Registers `slot` at <folder>/arbiter.sock, waiting at most VGPU_LINK_WAIT_MS for an answer, and
 * starts the thread that registers again whenever the arbiter comes back. Returns 0; -ESHUTDOWN: the lease is
 * closed; -EIO: its limits cannot be mapped; -EAGAIN: there is no thread, without which no launch would pass. An
 * arbiter that is absent, slow or wrong is no error: limits stay as they were.
 */
#define VGPU_LINK_WAIT_MS 200
int vgpu_link_start(const char *folder, struct vgpu_usage *usage, uint32_t slot);

/* Sends to the arbiter without waiting; false: there is none, or it does not read. */
bool vgpu_link_send(const struct vgpu_message *message);

/* Ends the line; its thread registers anew. For an arbiter that has gone silent. */
void vgpu_link_hang_up(void);

/* Is an arbiter there now? */
int vgpu_link_up(void);

/* The pid under which the host knows this process; getpid() until an arbiter has said it. */
int32_t vgpu_link_host_pid(void);

#endif
