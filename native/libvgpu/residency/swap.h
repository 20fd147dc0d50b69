/*
 * swap.h: takes a process's evictable memory (evictable.h) off the card and brings it back, as the lease requests
 * (vgpu_lease_memory). A separate thread, the swap thread, does this. No data is lost: a chunk is unmapped only when
 * its copy is complete, and a copy is dropped only when its chunk is back.
 *
 * A call that uses, makes or frees device memory counts itself as inside while it is in the driver. The call first
 * counts itself, and then checks whether the memory is held. The swap thread first holds the memory
 * (vgpu_suspended_hold), and then waits until no call is inside. So the swap thread waits for every such call that
 * reaches the driver. In a process without evictable memory a call pays only a load and a branch for this.
 *
 * Any thread may call these functions. vgpu_swap_enter waits without a time limit, until the lease is resumed.
 */
#ifndef VGPU_SWAP_H
#define VGPU_SWAP_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

struct vgpu_swap_words {
    _Alignas(64) uint32_t counts; /* 1: the process has had evictable memory, so calls count themselves */
    _Alignas(64) uint32_t inside;
};
extern struct vgpu_swap_words vgpu_swap;

static inline bool vgpu_swap_counts(void)
{
    return __atomic_load_n(&vgpu_swap.counts, __ATOMIC_ACQUIRE) != 0;
}

/* Waits while the memory is held, then enters. If it returns true, the caller must call vgpu_swap_leave. */
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

/* Makes a call of the driver that uses device memory, counted as inside. */
#define CALL_INSIDE(symbol, ...)                             \
    __extension__({                                          \
        bool entered_ = vgpu_swap_enter();                   \
        CUresult inside_result_ = CALL(symbol, __VA_ARGS__); \
        vgpu_swap_leave(entered_);                           \
        inside_result_;                                      \
    })

/* Returns whether new plain memory must be evictable: the lease requires it, and the swap thread runs. */
bool vgpu_swap_wanted(void);

/* Makes calls count themselves from now on. */
void vgpu_swap_count(void);

/* Adds `bytes`, which may be negative, to the amount of evictable memory of the process. */
void vgpu_swap_holds(int64_t bytes);

/*
 * Called before and after a call of the driver that may end a context. In between, the caller is inside, and the swap
 * thread makes no call in any context, not even to grow the host buffer ahead of an eviction. `entered` is the result
 * of vgpu_swap_ending_begins.
 */
bool vgpu_swap_ending_begins(void);
void vgpu_swap_ending_ends(bool entered);

/*
 * Called between vgpu_swap_ending_begins and vgpu_swap_ending_ends when a context has ended, and with it the swap
 * thread's objects there.
 */
void vgpu_swap_forget(CUcontext context);

#endif
