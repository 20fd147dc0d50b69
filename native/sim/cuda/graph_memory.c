/* Graph nodes that allocate and free memory. */
#include "graph.h"

/* Marks this graph and the graphs that contain it, because they contain its memory too. */
static void mark(CUgraph graph)
{
    for (; graph != NULL; graph = graph->parent == NULL ? NULL : graph->parent->graph)
        graph->has_memory = true;
}

static CUresult context_of(const CUmemPoolProps *props, CUcontext *ctx)
{
    CU_CHECK(props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(props->location.id >= 0 && props->location.id < cu.device_count, CUDA_ERROR_INVALID_DEVICE);
    *ctx = cu_current();
    if (!cu_is_context(*ctx) || (*ctx)->ordinal != props->location.id)
        *ctx = cu.devices[props->location.id].primary;
    return cu_is_context(*ctx) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cu_graph_add_alloc(CUgraph graph, const CUgraphNode *before, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params,
                            CUgraphNode *out)
{
    CUcontext ctx;
    struct cu_graph_memory *memory;
    CU_CHECK(params != NULL && params->bytesize > 0, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(context_of(&params->poolProps, &ctx));
    CU_TRY(cu_graph_memory_new(ctx, params->bytesize, &memory));
    CUresult result = cu_graph_add(graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC, before, count, out);
    if (result != CUDA_SUCCESS) {
        cu_graph_memory_release(memory);
        return result;
    }
    params->dptr = memory->address;
    (*out)->alloc.shape = *params;
    (*out)->alloc.memory = memory;
    mark(graph);
    return CUDA_SUCCESS;
}

CUresult cu_graph_add_free(CUgraph graph, const CUgraphNode *before, size_t count, CUdeviceptr p, CUgraphNode *out)
{
    CU_CHECK(cu_is_graph(graph) && cu_graph_memory_owns(p), CUDA_ERROR_INVALID_VALUE);
    for (CUgraphNode n = graph->first; n != NULL; n = n->next)
        CU_CHECK(n->type != CU_GRAPH_NODE_TYPE_MEM_FREE || n->free != p, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cu_graph_add(graph, CU_GRAPH_NODE_TYPE_MEM_FREE, before, count, out));
    (*out)->free = p;
    mark(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphAddMemAllocNode"));
    cu_lock();
    CUresult result = cu_graph_add_alloc(graph, before, count, params, out);
    cu_unlock();
    return result;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphMemAllocNodeGetParams"));
    CU_CHECK(cu_is_node(node) && node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && params != NULL,
             CUDA_ERROR_INVALID_VALUE);
    *params = node->alloc.shape;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, CUdeviceptr p)
{
    CU_TRY(cu_enter("cuGraphAddMemFreeNode"));
    cu_lock();
    CUresult result = cu_graph_add_free(graph, before, count, p, out);
    cu_unlock();
    return result;
}

CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *p)
{
    CU_TRY(cu_enter("cuGraphMemFreeNodeGetParams"));
    CU_CHECK(cu_is_node(node) && node->type == CU_GRAPH_NODE_TYPE_MEM_FREE && p != NULL, CUDA_ERROR_INVALID_VALUE);
    *p = node->free;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
    CU_TRY(cu_enter_device("cuDeviceGraphMemTrim", dev));
    cu_lock();
    CUmemoryPool pool = cu_pool_of_graphs(dev);
    if (pool != NULL)
        cu_pool_trim(pool, 0);
    cu_unlock();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
    CU_TRY(cu_enter_device("cuDeviceGetGraphMemAttribute", dev));
    CU_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUmemoryPool pool = cu_pool_of_graphs(dev);
    cu_unlock();
    CU_CHECK(pool != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    /* As on an H200, all reserved bytes count as used, those of destroyed graphs too. */
    const uint64_t values[] = {pool->reserved, pool->reserved_high, pool->reserved, pool->reserved_high};
    CU_CHECK((size_t)attribute < sizeof(values) / sizeof(values[0]), CUDA_ERROR_INVALID_VALUE);
    *(cuuint64_t *)value = values[attribute];
    return CUDA_SUCCESS;
}

CUresult cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
    CU_TRY(cu_enter_device("cuDeviceSetGraphMemAttribute", dev));
    CU_CHECK(value != NULL && *(cuuint64_t *)value == 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUmemoryPool pool = cu_pool_of_graphs(dev);
    CUresult result = pool == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    bool high = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
    if (pool != NULL && high)
        pool->reserved_high = pool->reserved;
    else
        result = CUDA_ERROR_INVALID_VALUE;
    cu_unlock();
    return result;
}
