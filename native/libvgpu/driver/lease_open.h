/*
 * lease_open.h: finds and maps the lease of this process.
 *
 * Precondition: no two threads call for the same view at the same time. Mappings stay until the caller unmaps them.
 */
#ifndef VGPU_LEASE_OPEN_H
#define VGPU_LEASE_OPEN_H

#include <stdbool.h>

#include "lease.h"

#define VGPU_LEASE_PATH_MAX 4096

/* A mapped lease. usage is NULL and usage_fd is -1 if `computes` was false and `usage` could not be opened for writing. */
struct vgpu_lease_view {
    char folder[VGPU_LEASE_PATH_MAX];
    const struct vgpu_limits *limits;
    struct vgpu_usage *usage;
    int usage_fd; /* the slot is locked while this descriptor is open (slot_lock.h) */
    struct vgpu_limits first;
    char wrong[128]; /* a description of the error, if it says more than the errno */
};

/*
 * Looks for a lease at VGPU_LEASE_MOUNT, then at the path in VGPU_LEASE_ENV, and last for variables that set limits
 * without a lease (standalone.h). Returns 1 if it is found and mapped; 0 if there is none; -EAGAIN if the answer is not
 * known yet, or vgpud is writing the limits; another -errno if there is a lease that cannot be read or is invalid.
 * `computes`: the process is about to use CUDA, so it must be able to write `usage`.
 */
int vgpu_lease_open(struct vgpu_lease_view *view, bool computes);

/*
 * Opens the file `name` in `folder`, or VGPU_USAGE_MOUNT for writing in a container, close-on-exec and without
 * following links. Returns a descriptor above 2, or -errno. The function opens no other descriptor (such as one of the
 * folder), because it would have to close it. A program that closes all descriptors may put its own file at that number
 * meanwhile, and the program's file would be closed.
 */
int vgpu_lease_file(const char *folder, const char *name, int flags);

/*
 * Closes a descriptor of vgpu_lease_file if it still refers to that file. If the program has put its own file at that
 * number, that file stays open.
 */
void vgpu_lease_close(const char *folder, const char *name, int fd);

/* Maps the limits in `folder` again, for the gate. Returns NULL if that fails. */
const struct vgpu_limits *vgpu_lease_limits(const char *folder);

#endif
