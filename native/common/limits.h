/*
 * limits.h: reading and checking the `limits` file of a lease.
 *
 * Any thread may call these functions; nothing is written to the page.
 */
#ifndef VGPU_LIMITS_H
#define VGPU_LIMITS_H

#include "lease.h"

/*
 * Copies the limits out of the shared page under the sequence lock and checks them.
 * Returns 0; -EAGAIN: a writer was at work (or died there) through all tries; -EINVAL: not a valid
 * limits page (magic, version, counts, strings or shares out of range). `copy` is set only on 0.
 */
int vgpu_limits_read(const struct vgpu_limits *shared, struct vgpu_limits *copy);

/* The present generation, odd during a write; a cheap check for changes. */
static inline uint64_t vgpu_limits_generation(const struct vgpu_limits *shared)
{
    return __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE);
}

/* The 16 bytes of a UUID in the form "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" (or "MIG-..."). 0 or -EINVAL. */
int vgpu_uuid_parse(const char *text, unsigned char bytes[16]);

#endif
