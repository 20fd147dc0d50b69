/* Edges of a graph. The edge data of version 2 may only say that the whole of one node runs before the other. */
#include "graph.h"

static bool is_plain(const CUgraphEdgeData *data, size_t count)
{
    for (size_t i = 0; data != NULL && i < count; i++)
        if (data[i].from_port != 0 || data[i].to_port != 0 || data[i].type != 0)
            return false;
    return true;
}

static void clear_data(CUgraphEdgeData *data, size_t count)
{
    if (data != NULL)
        memset(data, 0, count * sizeof(*data));
}

CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
{
    CU_TRY(cu_enter("cuGraphGetEdges_v2"));
    CU_CHECK(cu_is_graph(graph) && count != NULL && (from == NULL) == (to == NULL), CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    size_t n = 0;
    for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
        for (size_t i = 0; i < node->before_count; i++, n++) {
            if (from == NULL || n >= *count)
                continue;
            from[n] = node->before[i];
            to[n] = node;
        }
    }
    for (size_t i = n; from != NULL && i < *count; i++)
        from[i] = to[i] = NULL;
    if (from == NULL || *count > n)
        *count = n;
    cu_unlock();
    clear_data(from == NULL ? NULL : data, *count);
    return CUDA_SUCCESS;
}

CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    return cuGraphGetEdges_v2(graph, from, to, NULL, count);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *data, size_t *count)
{
    CU_TRY(cu_enter("cuGraphNodeGetDependencies_v2"));
    CU_CHECK(cu_is_node(node) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUresult result = cu_list_nodes(out, count, node->before, node->before_count);
    cu_unlock();
    clear_data(out == NULL ? NULL : data, *count);
    return result;
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *out, size_t *count)
{
    return cuGraphNodeGetDependencies_v2(node, out, NULL, count);
}

static bool depends(CUgraphNode node, CUgraphNode on)
{
    for (size_t i = 0; i < node->before_count; i++)
        if (node->before[i] == on)
            return true;
    return false;
}

CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *out, CUgraphEdgeData *data, size_t *count)
{
    CU_TRY(cu_enter("cuGraphNodeGetDependentNodes_v2"));
    CU_CHECK(cu_is_node(node) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUgraphNode *all = calloc(node->graph->node_count + 1, sizeof(*all));
    size_t n = 0;
    for (CUgraphNode other = node->graph->first; all != NULL && other != NULL; other = other->next)
        if (depends(other, node))
            all[n++] = other;
    CUresult result = all == NULL ? CUDA_ERROR_OUT_OF_MEMORY : cu_list_nodes(out, count, all, n);
    cu_unlock();
    free(all);
    clear_data(out == NULL ? NULL : data, *count);
    return result;
}

CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *out, size_t *count)
{
    return cuGraphNodeGetDependentNodes_v2(node, out, NULL, count);
}

static CUresult add_edge(CUgraph graph, CUgraphNode from, CUgraphNode to)
{
    CU_CHECK(cu_is_node(from) && cu_is_node(to) && from->graph == graph && to->graph == graph,
             CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(from != to && !depends(to, from), CUDA_ERROR_INVALID_VALUE);
    CUgraphNode *more = realloc(to->before, (to->before_count + 2) * sizeof(CUgraphNode));
    CU_CHECK(more != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    to->before = more;
    to->before[to->before_count++] = from;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *data, size_t count)
{
    CU_TRY(cu_enter("cuGraphAddDependencies_v2"));
    CU_CHECK(cu_is_graph(graph) && (count == 0 || (from != NULL && to != NULL)), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(is_plain(data, count), CUDA_ERROR_NOT_SUPPORTED);
    CUresult result = CUDA_SUCCESS;
    cu_lock();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = add_edge(graph, from[i], to[i]);
    cu_unlock();
    return result;
}

CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    return cuGraphAddDependencies_v2(graph, from, to, NULL, count);
}

static CUresult remove_edge(CUgraph graph, CUgraphNode from, CUgraphNode to)
{
    CU_CHECK(cu_is_node(from) && cu_is_node(to) && to->graph == graph && depends(to, from), CUDA_ERROR_INVALID_VALUE);
    size_t kept = 0;
    for (size_t i = 0; i < to->before_count; i++)
        if (to->before[i] != from)
            to->before[kept++] = to->before[i];
    to->before_count = kept;
    return CUDA_SUCCESS;
}

CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                      const CUgraphEdgeData *data, size_t count)
{
    CU_TRY(cu_enter("cuGraphRemoveDependencies_v2"));
    CU_CHECK(cu_is_graph(graph) && (count == 0 || (from != NULL && to != NULL)), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(!graph->has_memory, CUDA_ERROR_NOT_SUPPORTED);
    CU_CHECK(is_plain(data, count), CUDA_ERROR_NOT_SUPPORTED);
    CUresult result = CUDA_SUCCESS;
    cu_lock();
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = remove_edge(graph, from[i], to[i]);
    cu_unlock();
    return result;
}

CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    return cuGraphRemoveDependencies_v2(graph, from, to, NULL, count);
}
