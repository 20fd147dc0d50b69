/* lease_open.h: finding and mapping the lease of this process. */
#ifndef VGPU_LEASE_OPEN_H
#define VGPU_LEASE_OPEN_H

#include "lease.h"

#define VGPU_LEASE_PATH_MAX 4096

/* A mapped lease. usage and usage_fd are NULL and -1 if only the limits were asked for. */
struct vgpu_lease_view {
    char folder[VGPU_LEASE_PATH_MAX];
    const struct vgpu_limits *limits;
    struct vgpu_usage *usage;
    int usage_fd; /* open for the life of the process: it carries the slot's lock */
    struct vgpu_limits first;
};

/*
 * Looks for a lease at VGPU_LEASE_MOUNT, then where VGPU_LEASE_ENV points. Returns 1: found and
 * mapped; 0: this process has none; -errno: there is one, but it cannot be read or is not valid.
 * A `usage` that this user may not write is an error only with `need_usage`.
 */
int vgpu_lease_open(struct vgpu_lease_view *view, int need_usage);

#endif
