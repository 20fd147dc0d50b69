/* fake.h: shared by the parts of the fake driver. */
#ifndef FAKE_H
#define FAKE_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define DEVICES 2
#define CONTEXT_BYTES (64ull << 20)
#define CARD_BYTES (8ull << 30)
#define PAGE_BYTES (2ull << 20)

extern pthread_mutex_t fake_mutex;
extern __thread CUcontext fake_current;

int fake_device(void);     /* device of the current context */
int fake_no_context(void); /* CUDA_SUCCESS if the thread has a context */
#define NEED_CONTEXT                       \
    if (fake_no_context() != CUDA_SUCCESS) \
        return (CUresult)fake_no_context();

/* Three functions that count a device's bytes in use. The caller holds the mutex. */
void fake_count(int device, uint64_t bytes);
void fake_uncount(int device, uint64_t bytes);
bool fake_has_room(int device, uint64_t bytes);

/* Runs inside the driver's call before memory is freed. At this point libvgpu must not have removed the charge yet. */
void fake_linger(int device);

CUresult fake_drop(uint64_t handle);
void fake_drop_later(uint64_t handle); /* frees the memory at the next synchronisation */
void fake_drop_due(void);
bool fake_pool_free(CUdeviceptr pointer); /* returns false if the memory is not a pool's */

#endif
