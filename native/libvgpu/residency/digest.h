/*
 * digest.h: 128-bit digests of device memory. A kernel on the device makes them, some sixty times as fast as the bus
 * copies the memory. Two digests of a range are equal if the range is unchanged. They are sums over the words of a range
 * of two mixed values each, with seeds that are drawn once in a process: a change of one word always changes them, and
 * another change is missed with a probability of about 2^-128. A program that knows the seeds could only deceive itself.
 *
 * Only the thread of swap.h may call these functions.
 */
#ifndef VGPU_DIGEST_H
#define VGPU_DIGEST_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

#define VGPU_DIGESTS 256u /* most digests between two calls of vgpu_digest_read */

struct vgpu_digest {
    uint64_t a;
    uint64_t b;
};

/*
 * Prepares for digests in the current context. Returns false if the driver cannot load the kernel there (for example, its
 * compiler for PTX is missing).
 */
bool vgpu_digest_begin(void);

/* Starts the digest number `place` (below VGPU_DIGESTS). Precondition: `bytes` is a multiple of 16. */
CUresult vgpu_digest_add(unsigned place, CUdeviceptr base, uint64_t bytes, CUstream stream);

/* Waits for the digests from 0 to `count`, and writes them. Returns an error if the kernel did not write them. */
CUresult vgpu_digest_read(struct vgpu_digest *digests, unsigned count, CUstream stream);

/* The context of the kernel has ended. */
void vgpu_digest_forget(void);

#endif
