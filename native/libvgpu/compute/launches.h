/* launches.h: the counters of this process's launches, written by the gate and the pacing. */
#ifndef VGPU_LAUNCHES_H
#define VGPU_LAUNCHES_H

#include <stdint.h>

/* All counts are by weight. Any thread reads and writes them with atomics. */
struct vgpu_launch_words {
    _Alignas(64) uint64_t count; /* launches so far */
    _Alignas(64) uint64_t allow; /* launches below this count need no check; UINT64_MAX: they are not even counted */
    uint64_t asked;              /* of count: those in vgpu_gate_look, or between it and the driver */
};
extern struct vgpu_launch_words vgpu_launches;

#endif
