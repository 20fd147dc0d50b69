/* launches.h: the counters of this process's launches, which the gate and the pacing move. */
#ifndef VGPU_LAUNCHES_H
#define VGPU_LAUNCHES_H

#include <stdint.h>

/* All by weight. Read and written with atomics by any thread. */
struct vgpu_launch_words {
    _Alignas(64) uint64_t count; /* launched so far */
    _Alignas(64) uint64_t allow; /* launches below this count need no look; UINT64_MAX: they are not counted either */
    uint64_t asked;              /* of count: in vgpu_gate_look, or on their way from it to the driver */
};
extern struct vgpu_launch_words vgpu_launches;

#endif
