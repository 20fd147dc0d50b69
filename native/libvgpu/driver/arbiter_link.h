/*
 * arbiter_link.h: this process's connection to the arbiter. Memory accounting does not need it (the slot's lock shows
 * that the process lives). It registers the process, and gives the process its pid on the host.
 *
 * Any thread may call the functions but vgpu_link_start, which is called once, with the tenant's lock held.
 */
#ifndef VGPU_LINK_H
#define VGPU_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "in_child.h"
#include "lease.h"

/* The receiver of messages. The link's thread calls every function but `start`. */
struct vgpu_link_listener {
    /* Called first. `folder` is the lease's. False: the lease's limits cannot be mapped. */
    bool (*start)(const char *folder, struct vgpu_usage *usage, uint32_t slot);
    void (*linked)(void);   /* an arbiter has registered the process */
    void (*unlinked)(void); /* the arbiter has gone, or was absent at the start */
    void (*message)(const struct vgpu_message *message);
    /* Returns the nanoseconds until the next call, or -1: only after a message. */
    int64_t (*tick)(void);
};

/* Registers a `static const struct vgpu_link_listener`; the library has exactly one. */
#define VGPU_LINK_LISTENER(name) \
    VGPU_RETAINED                \
    __attribute__((section("vgpu_link_listener"))) static const struct vgpu_link_listener *const name##_listed = &name

/*
 * Registers `slot` at <folder>/arbiter.sock, waiting at most VGPU_LINK_WAIT_MS for an answer, and starts the thread
 * that registers again whenever the arbiter comes back. Returns 0; -ESHUTDOWN: the lease is closed; -EIO: its limits
 * cannot be mapped; -EAGAIN: no thread could be started, without which no launch would be admitted. An absent, slow or
 * faulty arbiter is no error: limits stay in force.
 */
#define VGPU_LINK_WAIT_MS 200
int vgpu_link_start(const char *folder, struct vgpu_usage *usage, uint32_t slot);

/* Sends to the arbiter without waiting; false: there is none, or it does not read. */
bool vgpu_link_send(const struct vgpu_message *message);

/* Closes the connection to an arbiter that does not answer; the link's thread registers again. */
void vgpu_link_hang_up(void);

/* Is an arbiter connected now? */
int vgpu_link_up(void);

/* The same without the link's thread, which may not have seen yet that the arbiter has gone. */
bool vgpu_link_lives(void);

/* The pid of this process on the host; getpid() until an arbiter has reported it. */
int32_t vgpu_link_host_pid(void);

#endif
