/* door.h: what goes over vgpud's runtime.sock. One request a connection; all numbers as this machine has
 * them. vgpud/serve/runtime_wire.py has it too. */
#ifndef VGPU_RUNTIME_DOOR_H
#define VGPU_RUNTIME_DOOR_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_DOOR_MAGIC 0x54524756u /* "VGRT" */
#define VGPU_DOOR_SOCKET "runtime.sock"

enum vgpu_door_verb {
    VGPU_DOOR_PREPARE = 1, /* id: the container's; body: its config.json */
    VGPU_DOOR_BIND = 2,    /* id: the allocation's; a pidfd of the container's init comes along */
    VGPU_DOOR_END = 3,     /* id: the allocation's; its container is gone */
};

enum vgpu_door_status {
    VGPU_DOOR_DONE = 0,      /* PREPARE: the body is the config.json to use */
    VGPU_DOOR_UNCHANGED = 1, /* PREPARE: nothing was asked for */
    VGPU_DOOR_REFUSED = 2,   /* the body is a sentence, and a hint on a line of its own */
};

enum { VGPU_DOOR_FOR_PARENT = 1 }; /* flag of PREPARE: it is the caller's parent that will run the container */

struct vgpu_door_request {
    uint32_t magic, verb, flags, id_length, body_length;
};

struct vgpu_door_reply {
    uint32_t magic, status, body_length;
};

struct vgpu_door_call {
    const char *run_dir; /* of vgpud */
    uint32_t verb, flags;
    const char *id;
    const char *body; /* may be NULL */
    size_t body_length;
    int pidfd;         /* -1: none */
    double patience_s; /* how long there may be nobody who listens */
    int answer_s;      /* and how long an answer may take; systemd listens while vgpud is away */
};

/* The status, or -1 with errno where vgpud did not answer. *reply is allocated, ends with a zero byte. */
int vgpu_door_call(const struct vgpu_door_call *call, char **reply, size_t *reply_length);

#endif
