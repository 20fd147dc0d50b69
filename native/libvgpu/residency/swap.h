/*
 * swap.h: taking a process's evictable memory (evictable.h) off the card and bringing it back, as the lease says
 * (vgpu_lease_memory), by a thread of its own. Nothing is lost on the way: a chunk is unmapped when its copy is whole,
 * and a copy is forgotten when its chunk is back.
 *
 * Calls that touch device memory, make it or free it count themselves as inside while they are in the driver: first
 * they enter, then they look whether the memory is held; the thread holds it first, then waits until no thread is
 * inside. So nothing reaches the driver that was not waited for. In a process without evictable memory a
 * call pays a load and a branch for this.
 *
 * Any thread may call these functions. vgpu_swap_enter waits without a time limit, until the lease is resumed.
 */
#ifndef VGPU_SWAP_H
#define VGPU_SWAP_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

struct vgpu_swap_words {
    _Alignas(64) uint32_t counts; /* 1: there is evictable memory */
    _Alignas(64) uint32_t inside;
};
extern struct vgpu_swap_words vgpu_swap;

static inline bool vgpu_swap_counts(void)
{
    return __atomic_load_n(&vgpu_swap.counts, __ATOMIC_ACQUIRE) != 0;
}

/* Waits while the memory is held, and enters; true: vgpu_swap_leave is due. */
bool vgpu_swap_enter_counted(void);

static inline bool vgpu_swap_enter(void)
{
    return __builtin_expect(__atomic_load_n(&vgpu_swap.counts, __ATOMIC_RELAXED), 0) && vgpu_swap_enter_counted();
}

static inline void vgpu_swap_leave(bool entered)
{
    if (__builtin_expect(entered, 0))
        __atomic_sub_fetch(&vgpu_swap.inside, 1, __ATOMIC_SEQ_CST);
}

/* A call of the driver that touches device memory. */
#define CALL_INSIDE(symbol, ...)                             \
    __extension__({                                          \
        bool entered_ = vgpu_swap_enter();                   \
        CUresult inside_result_ = CALL(symbol, __VA_ARGS__); \
        vgpu_swap_leave(entered_);                           \
        inside_result_;                                      \
    })

/* Does the lease require plain memory to be evictable? */
bool vgpu_swap_wanted(void);

/* Makes calls count themselves from now on. */
void vgpu_swap_count(void);

/* Adds to the amount of evictable memory of the process. */
void vgpu_swap_holds(int64_t bytes);

/* Called before a context ends: the thread has no objects in it afterwards. Precondition: the caller is inside. */
void vgpu_swap_forget(CUcontext context);

#endif
