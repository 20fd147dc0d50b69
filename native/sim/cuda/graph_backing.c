/*
 * Memory of graphs: the addresses of allocation nodes, and the pool of each device that backs them. As the driver's
 * pool, it keeps the memory that it once took until cuDeviceGraphMemTrim.
 */
#include "graph.h"

static struct cu_graph_memory *g_memories[4096];

static struct cu_graph_memory **slot_of(CUdeviceptr p)
{
    for (size_t i = 0; i < sizeof(g_memories) / sizeof(g_memories[0]); i++)
        if (p == 0 ? g_memories[i] == NULL : g_memories[i] != NULL && g_memories[i]->address == p)
            return &g_memories[i];
    return NULL;
}

bool cu_graph_memory_owns(CUdeviceptr p)
{
    return p != 0 && slot_of(p) != NULL;
}

CUresult cu_graph_memory_new(CUcontext ctx, size_t size, struct cu_graph_memory **out)
{
    struct cu_graph_memory **slot = slot_of(0), *m = calloc(1, sizeof(*m));
    CUdeviceptr address = m == NULL || slot == NULL ? 0 : cu_arena_take(cu_round_page(size));
    if (address == 0) {
        free(m);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *m = (struct cu_graph_memory){.refs = 1, .address = address, .size = size, .ctx = ctx};
    *slot = m;
    *out = m;
    return CUDA_SUCCESS;
}

void cu_graph_memory_release(struct cu_graph_memory *m)
{
    if (--m->refs > 0)
        return;
    *slot_of(m->address) = NULL;
    cu_arena_give(m->address, cu_round_page(m->size));
    free(m);
}

static void freed(const struct cu_block *b)
{
    if (b->memory == NULL)
        return;
    b->memory->live = false;
    cu_graph_memory_release(b->memory);
}
CU_AT_END(cu_block_end, cu_block_ends, freed);

CUresult cu_graph_memory_take(struct cu_graph_memory *m)
{
    CUmemoryPool pool = cu_pool_of_graphs(m->ctx->ordinal);
    CU_CHECK(pool != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CU_TRY(cu_block_place(m->ctx, pool, m, m->address, m->size));
    m->live = true;
    m->refs++;
    return CUDA_SUCCESS;
}
