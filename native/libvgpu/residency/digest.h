/*
 * digest.h: 128-bit digests of device memory. A kernel on the device computes them, some sixty times as fast as the bus
 * copies the memory. Two digests of a range are equal if the range is unchanged. A digest is two sums over the words of
 * the range; each word is mixed with seeds that are drawn once in a process. A change of one word always changes the
 * digest. Any other change is missed with a probability of about 2^-128. A tenant that knows the seeds can only hide
 * changes of its own memory.
 *
 * Only the thread of swap.h may call these functions. vgpu_digest_forget may be called by another thread while
 * vgpu_evict_stop keeps that thread from digests.
 */
#ifndef VGPU_DIGEST_H
#define VGPU_DIGEST_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

#define VGPU_DIGESTS 256u /* maximum of digests between two calls of vgpu_digest_read */

struct vgpu_digest {
    uint64_t a;
    uint64_t b;
};

/*
 * Loads the kernel in the current context, at the first call there, and clears the sums. Returns false if the driver
 * refused the kernel (for example, because its PTX compiler is missing) or the host memory for its sums.
 */
bool vgpu_digest_begin(void);

/* Starts to compute the digest with number `place` (below VGPU_DIGESTS). Precondition: `bytes` is a multiple of 16. */
CUresult vgpu_digest_add(unsigned place, CUdeviceptr base, uint64_t bytes, CUstream stream);

/* Waits for the digests with numbers below `count`, and writes them. Returns an error if the kernel did not run. */
CUresult vgpu_digest_read(struct vgpu_digest *digests, unsigned count, CUstream stream);

/* Called when the context in which the kernel was loaded has ended. */
void vgpu_digest_forget(void);

#endif
