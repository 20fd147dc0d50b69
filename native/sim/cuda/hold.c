/*
 * Kernels that wait: those of a module whose PTX says `// vgpu-sim-waits` end when a word of host memory is large
 * enough, as a kernel of a collective operation waits for those of its peers. Their first three parameters are, in 64
 * bits each: the word's address, the least value that ends the kernel, and the address where the kernel writes this
 * value when it begins. No thread runs in the background, so the calls of a kernel's process bring its state up to
 * date.
 */
#include <time.h>

#include "internal.h"

enum { HOLDS = 64, LOOK_AGAIN_NS = 50000 };
/*
 * after this time a waiting kernel ends by itself; a double does not represent single nanoseconds in much larger sums
 * of time
 */
#define LONGEST_NS 4e12

struct hold {
    CUcontext ctx; /* NULL: the entry is free */
    double begin, end;
    bool begun;
    const uint64_t *word;
    uint64_t value;
    uint64_t *says;
};

static struct hold g_holds[HOLDS];
static _Atomic int g_count;

static void look(struct hold *h)
{
    struct sim_use *use = cu_device_of(h->ctx)->use;
    if (use == NULL)
        return;
    if (!h->begun && sim_engine_reached(cu.s, use, h->begin, NULL)) {
        __atomic_store_n(h->says, h->value, __ATOMIC_SEQ_CST);
        h->begun = true;
    }
    if (!h->begun || __atomic_load_n(h->word, __ATOMIC_SEQ_CST) < h->value)
        return;
    if (!sim_engine_release(cu.s, use, h->end))
        return;
    h->ctx = NULL;
    atomic_fetch_sub(&g_count, 1);
}

void cu_holds_look(void)
{
    if (atomic_load_explicit(&g_count, memory_order_relaxed) == 0)
        return;
    cu_lock();
    for (int i = 0; i < HOLDS; i++)
        if (g_holds[i].ctx != NULL)
            look(&g_holds[i]);
    cu_unlock();
}

static bool is_reached(CUcontext ctx, double position)
{
    struct sim_use *use = cu_device_of(ctx)->use;
    return use == NULL || sim_engine_reached(cu.s, use, position, NULL);
}

bool cu_holds_wait(CUcontext ctx, double position)
{
    struct timespec pause = {0, LOOK_AGAIN_NS};
    while (atomic_load_explicit(&g_count, memory_order_relaxed) > 0) {
        cu_holds_look();
        if (is_reached(ctx, position))
            return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

CUresult cu_hold_add(CUcontext ctx, void **parameters, double *end)
{
    for (int i = 0; i < HOLDS; i++) {
        if (g_holds[i].ctx != NULL)
            continue;
        *end = sim_engine_submit(cu.s, cu.proc, cu_device_of(ctx)->use, LONGEST_NS);
        g_holds[i] = (struct hold){.ctx = ctx,
                                   .begin = *end - LONGEST_NS,
                                   .end = *end,
                                   .word = *(const uint64_t **)parameters[0],
                                   .value = *(uint64_t *)parameters[1],
                                   .says = *(uint64_t **)parameters[2]};
        atomic_fetch_add(&g_count, 1);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
}
