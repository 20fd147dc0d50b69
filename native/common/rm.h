/*
 * rm.h: the facts of the driver's resource manager that preemption needs. Numbers and layouts are from NVIDIA's
 * published headers (open-gpu-kernel-modules: nv_escape.h, nvos.h, nvstatuscodes.h, cl*.h, ctrl2080fifo.h,
 * ctrl2080gpu.h) and were checked with driver 580.159.04 on an H100. NVIDIA does not document them as an interface:
 * native/probe verifies them on each device before the arbiter uses them.
 *
 * A process's calls go through an open file of /dev/nvidiactl. A client (the root of a process's objects) belongs to
 * the open file that made it; a call with its handle on another file is refused.
 */
#ifndef VGPU_RM_H
#define VGPU_RM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#define RM_CONTROL_DEVICE "/dev/nvidiactl"

/* The numbers of ioctl(2) requests, which also contain type 'F', the size of the structure, read and write. */
#define RM_IOCTL_TYPE 'F'
enum rm_escape {
    RM_ESCAPE_FREE = 0x29,
    RM_ESCAPE_CONTROL = 0x2a,
    RM_ESCAPE_ALLOC = 0x2b,
};

enum rm_class {
    RM_CLASS_DEVICE = 0x0080,        /* class of a device object; its parent is the client */
    RM_CLASS_SUBDEVICE = 0x2080,     /* class of a subdevice; its parent is a device */
    RM_CLASS_CHANNEL_GROUP = 0xa06c, /* class of a channel group; its parent is a device */
    RM_CLASS_CHANNEL_LOW = 0x6f,     /* low byte of every channel class (0xc86f on Hopper); its parent is a group */
    RM_CLASS_COMPUTE_LOW = 0xc0,     /* low byte of every compute class (0xcbc0 on Hopper); its parent is a channel */
};

enum rm_status {
    RM_OK = 0,
    RM_INSUFFICIENT_RESOURCES = 0x1a,
    RM_INSUFFICIENT_PERMISSIONS = 0x1b,
    RM_INVALID_ARGUMENT = 0x1f,
    RM_INVALID_CHANNEL = 0x21,
    RM_INVALID_CLIENT = 0x23,
    RM_INVALID_OBJECT_HANDLE = 0x33,
    RM_NOT_SUPPORTED = 0x56,
    RM_OBJECT_NOT_FOUND = 0x57,
};

/*
 * Argument of RM_ESCAPE_ALLOC, which makes an object. The structure has two lengths (below: rm_alloc_short), which the
 * size in the ioctl request distinguishes. For a new client, `client` is its own handle.
 */
struct rm_alloc {
    uint32_t client;
    uint32_t parent;
    uint32_t object; /* the handle of the new object */
    uint32_t class_id;
    uint64_t parameters;
    uint64_t rights;
    uint32_t parameters_size;
    uint32_t flags;
    uint32_t status;
    uint32_t unused;
};
struct rm_alloc_short {
    uint32_t client;
    uint32_t parent;
    uint32_t object;
    uint32_t class_id;
    uint64_t parameters;
    uint32_t parameters_size;
    uint32_t status;
};

/* Argument of RM_ESCAPE_FREE, which frees the object and everything below it. */
struct rm_free {
    uint32_t client;
    uint32_t parent;
    uint32_t object;
    uint32_t status;
};

/* Argument of RM_ESCAPE_CONTROL, which calls a command of an object. */
struct rm_control {
    uint32_t client;
    uint32_t object;
    uint32_t command;
    uint32_t flags;
    uint64_t parameters;
    uint32_t parameters_size;
    uint32_t status;
};

/* Control call of a subdevice: returns its UUID, as text ("GPU-...") or as 16 bytes. */
#define RM_GET_GID 0x2080014au
#define RM_GID_TEXT 0u
#define RM_GID_BINARY 2u
struct rm_gid {
    uint32_t index;
    uint32_t flags;
    uint32_t length; /* length of the answer, with the NUL of a text */
    uint8_t data[256];
};

/*
 * Control call of a subdevice. With `disable`, the channels are stopped when the call returns, even in the middle of a
 * kernel; without it they continue.
 */
#define RM_DISABLE_CHANNELS 0x2080110bu
#define RM_DISABLE_CHANNELS_MAX 64u
struct rm_disable_channels {
    uint8_t disable;
    uint8_t unused0[3];
    uint32_t count;
    uint8_t only_scheduling;
    uint8_t rewind;
    uint8_t unused1[6];
    uint64_t event; /* unused field, always 0 */
    uint32_t clients[RM_DISABLE_CHANNELS_MAX];
    uint32_t channels[RM_DISABLE_CHANNELS_MAX];
};

/*
 * Control calls of a channel group, and of a channel outside of a group. With `enable`, their work can run from now on,
 * also on channels that were disabled before; without it, their work no longer runs (ctrla06fgpfifo.h). libcuda makes
 * the call for a group after all of its channels, 30 ms after the first (seen on an H100).
 */
#define RM_SCHEDULE_GROUP 0xa06c0101u
#define RM_SCHEDULE_CHANNEL 0xa06f0103u
struct rm_schedule {
    uint8_t enable;
    uint8_t unused[2];
};

#define RM_REQUEST(escape, structure) _IOWR(RM_IOCTL_TYPE, escape, structure)

_Static_assert(sizeof(struct rm_alloc) == 48, "driver's ABI");
_Static_assert(sizeof(struct rm_alloc_short) == 32, "driver's ABI");
_Static_assert(sizeof(struct rm_free) == 16, "driver's ABI");
_Static_assert(sizeof(struct rm_control) == 32, "driver's ABI");
_Static_assert(sizeof(struct rm_gid) == 268, "driver's ABI");
_Static_assert(sizeof(struct rm_disable_channels) == 536, "driver's ABI");
_Static_assert(sizeof(struct rm_schedule) == 3, "driver's ABI");

#endif
