/* launches.h: the counters of this process's launches. The gate writes them; cut.c writes `allow` too. */
#ifndef VGPU_LAUNCHES_H
#define VGPU_LAUNCHES_H

#include <stdint.h>

/* All counts are by weight. Any thread reads and writes them with atomics. */
struct vgpu_launch_words {
    _Alignas(64) uint64_t count; /* number of launches so far */
    _Alignas(64) uint64_t allow; /* launches below this count need no check; UINT64_MAX: they are not even counted */
    /* launches included in `count` that are in vgpu_gate_look, or between it and the driver */
    uint64_t asked;
};
extern struct vgpu_launch_words vgpu_launches;

static inline uint64_t vgpu_launches_counted(void)
{
    return __atomic_load_n(&vgpu_launches.count, __ATOMIC_SEQ_CST);
}

#endif
