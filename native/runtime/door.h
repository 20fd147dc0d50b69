/*
 * door.h: the messages on vgpud's runtime.sock. Each connection carries one request. Numbers are in the machine's byte
 * order. vgpud/serve/runtime_wire.py repeats these definitions.
 */
#ifndef VGPU_RUNTIME_DOOR_H
#define VGPU_RUNTIME_DOOR_H

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#define VGPU_DOOR_MAGIC 0x54524756u /* "VGRT" in ASCII */
#define VGPU_DOOR_SOCKET "runtime.sock"

enum vgpu_door_verb {
    /* a container is to be started; id is its id, or "id/name" with the engine's name; the body is its config.json */
    VGPU_DOOR_PREPARE = 1,
    VGPU_DOOR_BIND = 2, /* a container's init process exists; id is the allocation's, with a pidfd of the process */
    VGPU_DOOR_END = 3,  /* the container of allocation `id` has ended */
};

enum vgpu_door_status {
    VGPU_DOOR_DONE = 0,      /* accepted; after PREPARE, the body is the config.json to use */
    VGPU_DOOR_UNCHANGED = 1, /* after PREPARE: the container has no request */
    VGPU_DOOR_REFUSED = 2,   /* refused; the body is a sentence, with a hint on a second line */
};

enum { VGPU_DOOR_BODY_MAX = 1 << 20 }; /* bytes of a request's body that vgpud reads */

enum { VGPU_DOOR_FOR_PARENT = 1 }; /* flag of PREPARE: the caller's parent, and not the caller, runs the container */

struct vgpu_door_request {
    uint32_t magic, verb, flags, id_length, body_length;
};

struct vgpu_door_reply {
    uint32_t magic, status, body_length;
};

struct vgpu_door_call {
    const char *run_dir; /* vgpud's run folder */
    uint32_t verb, flags;
    const char *id;
    const char *body; /* body of the request; may be NULL */
    size_t body_length;
    int pidfd;         /* pidfd to pass; -1: none */
    double patience_s; /* seconds for which the request is repeated while vgpud does not reply */
    /* maximum wait for one send or receive, in seconds; systemd keeps the socket open while vgpud restarts */
    int answer_s;
};

/*
 * Makes a request. Returns the status, or -1 with errno if vgpud did not reply or memory is short. If it returns a
 * status, *reply is allocated, and ends with a zero byte. A body above VGPU_DOOR_BODY_MAX is refused
 * (VGPU_DOOR_REFUSED) without vgpud.
 */
int vgpu_door_call(const struct vgpu_door_call *call, char **reply, size_t *reply_length);

/*
 * May the config.json have a request for a part of a device? True also if a letter is written as an escape, or the name
 * of an annotation in capitals, because that can hide a request.
 */
bool vgpu_may_ask(const char *config, size_t length);

#endif
