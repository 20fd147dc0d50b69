/*
 * lease_limits.h: reads and checks the `limits` file of a lease.
 *
 * Any thread may call these functions; nothing is written to the page.
 */
#ifndef VGPU_LEASE_LIMITS_H
#define VGPU_LEASE_LIMITS_H

#include "lease.h"

/*
 * Copies the limits out of the shared page under the sequence lock and checks them. Returns 0; -EAGAIN if a writer was
 * at work (or died while writing) during all attempts; -EINVAL if the page is not valid (magic, version, counts,
 * strings or shares out of range). `copy` is set only if 0 is returned.
 */
int vgpu_limits_read(const struct vgpu_limits *shared, struct vgpu_limits *copy);

/* Returns the present generation, which is odd during a write. It is a cheap check for changes. */
static inline uint64_t vgpu_limits_generation(const struct vgpu_limits *shared)
{
    return __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE);
}

/*
 * Converts a UUID of the form "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" (or "MIG-...") to its 16 bytes. Returns 0 or
 * -EINVAL.
 */
int vgpu_uuid_parse(const char *text, unsigned char bytes[16]);

#endif
