/*
 * lease_open.h: finding and mapping the lease of this process.
 *
 * The caller has a lock where two threads may call for the same view. What is mapped stays mapped until the caller
 * unmaps it.
 */
#ifndef VGPU_LEASE_OPEN_H
#define VGPU_LEASE_OPEN_H

#include <stdbool.h>

#include "lease.h"

#define VGPU_LEASE_PATH_MAX 4096

/* A mapped lease. usage and usage_fd are NULL and -1 if only the limits were asked for. */
struct vgpu_lease_view {
    char folder[VGPU_LEASE_PATH_MAX];
    const struct vgpu_limits *limits;
    struct vgpu_usage *usage;
    int usage_fd; /* while it is open its slot stays locked: see slot_lock.h */
    struct vgpu_limits first;
    char wrong[128]; /* what is wrong, where more can be said than the errno does */
};

/*
 * Looks for a lease at VGPU_LEASE_MOUNT, then where VGPU_LEASE_ENV points, and last for variables that ask
 * for limits without one (standalone.h). Returns 1: found and mapped; 0: this process has none; -errno: there
 * is one, but it cannot be read or is not valid; -EAGAIN: it cannot be told yet.
 * `computes`: the process is about to use CUDA, so it must be able to write `usage`.
 */
int vgpu_lease_open(struct vgpu_lease_view *view, bool computes);

/* Opens the file `name` of the lease in `folder`, close-on-exec and no link: a descriptor above 2, or -errno. */
int vgpu_lease_file(const char *folder, const char *name, int flags);

/* The limits in `folder` once more, mapped for the gate; NULL if they cannot be. */
const struct vgpu_limits *vgpu_lease_limits(const char *folder);

#endif
