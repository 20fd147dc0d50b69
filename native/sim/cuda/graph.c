/* CUDA graphs as data structures: nodes, edges and clones. */
#include "graph.h"

static unsigned int g_next_graph;

CUgraph cu_graph_new(void)
{
    CUgraph graph = calloc(1, sizeof(*graph));
    if (graph != NULL) {
        graph->magic = CU_GRAPH;
        graph->id = ++g_next_graph;
    }
    return graph;
}

static void free_node(CUgraphNode node)
{
    if (node->type == CU_GRAPH_NODE_TYPE_GRAPH && node->child != NULL)
        cu_graph_free(node->child);
    if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && node->alloc.memory != NULL)
        cu_graph_memory_release(node->alloc.memory);
    node->magic = CU_DEAD;
    free(node->before);
    free(node);
}

void cu_graph_free(CUgraph graph)
{
    while (graph->execs != NULL) {
        graph->execs->source = NULL;
        graph->execs = graph->execs->next;
    }
    while (graph->first != NULL) {
        CUgraphNode node = graph->first;
        graph->first = node->next;
        free_node(node);
    }
    while (graph->objects != NULL) {
        struct cu_kept_object *kept = graph->objects;
        graph->objects = kept->next;
        cu_object_drop(kept->object, kept->count);
        free(kept);
    }
    graph->magic = CU_DEAD;
    free(graph->order);
    free(graph);
}

static bool may_depend(CUgraph graph, const CUgraphNode *before, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!cu_is_node(before[i]) || before[i]->graph != graph)
            return false;
        for (size_t j = 0; j < i; j++)
            if (before[j] == before[i])
                return false;
    }
    return true;
}

CUresult cu_graph_add(CUgraph graph, CUgraphNodeType type, const CUgraphNode *before, size_t count, CUgraphNode *out)
{
    CU_CHECK(cu_is_graph(graph) && out != NULL && (count == 0 || before != NULL), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(may_depend(graph, before, count), CUDA_ERROR_INVALID_VALUE);
    CUgraphNode node = calloc(1, sizeof(*node));
    CUgraphNode *copy = calloc(count + 1, sizeof(*copy));
    if (node == NULL || copy == NULL) {
        free(node);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++)
        copy[i] = before[i];
    node->magic = CU_NODE;
    node->type = type;
    node->graph = graph;
    node->id = graph->next_node++;
    node->before = copy;
    node->before_count = count;
    if (graph->last != NULL)
        graph->last->next = node;
    else
        graph->first = node;
    graph->last = node;
    graph->node_count++;
    *out = node;
    return CUDA_SUCCESS;
}

static void unlink_node(CUgraph graph, CUgraphNode node)
{
    CUgraphNode previous = NULL;
    for (CUgraphNode n = graph->first; n != node; n = n->next)
        previous = n;
    if (previous != NULL)
        previous->next = node->next;
    else
        graph->first = node->next;
    if (graph->last == node)
        graph->last = previous;
    graph->node_count--;
}

void cu_graph_drop_last(CUgraph graph, CUgraphNode node)
{
    unlink_node(graph, node);
    free_node(node);
}

CUgraphNode cu_graph_find_clone(CUgraph graph, CUgraphNode original)
{
    for (CUgraphNode n = graph->first; n != NULL; n = n->next) {
        if (n->origin == original)
            return n;
        if (n->type == CU_GRAPH_NODE_TYPE_GRAPH) {
            CUgraphNode inner = cu_graph_find_clone(n->child, original);
            if (inner != NULL)
                return inner;
        }
    }
    return NULL;
}

static CUresult clone_node(CUgraph to, CUgraphNode from, bool with_memory)
{
    CUgraphNode made;
    CU_TRY(cu_graph_add(to, from->type, NULL, 0, &made));
    CUgraphNode *before = calloc(from->before_count + 1, sizeof(*before)), next = made->next;
    CU_CHECK(before != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    free(made->before);
    unsigned int id = made->id;
    *made = *from;
    made->id = id;
    made->graph = to;
    made->origin = from;
    made->next = next;
    made->before = before;
    made->before_count = 0; /* set after all nodes exist */
    if (from->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        made->alloc.memory = NULL;
        CU_CHECK(with_memory, CUDA_ERROR_NOT_SUPPORTED);
        made->alloc.memory = from->alloc.memory;
        made->alloc.memory->refs++;
    }
    if (from->type == CU_GRAPH_NODE_TYPE_GRAPH) {
        made->child = NULL;
        CU_TRY(cu_graph_clone(from->child, with_memory, &made->child));
        made->child->parent = made;
    }
    return CUDA_SUCCESS;
}

static CUgraphNode direct_clone(CUgraph graph, CUgraphNode original)
{
    CUgraphNode n = graph->first;
    while (n != NULL && n->origin != original)
        n = n->next;
    return n;
}

CUresult cu_graph_clone(CUgraph from, bool with_memory, CUgraph *out)
{
    CUgraph to = cu_graph_new();
    CUresult result = to == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    for (CUgraphNode n = from->first; n != NULL && result == CUDA_SUCCESS; n = n->next)
        result = clone_node(to, n, with_memory);
    if (result != CUDA_SUCCESS) {
        if (to != NULL)
            cu_graph_free(to);
        return result;
    }
    for (CUgraphNode n = to->first; n != NULL; n = n->next)
        for (size_t i = 0; i < n->origin->before_count; i++)
            n->before[n->before_count++] = direct_clone(to, n->origin->before[i]);
    to->origin = from;
    to->has_memory = from->has_memory;
    *out = to;
    return CUDA_SUCCESS;
}

static bool is_ready(CUgraphNode node)
{
    for (size_t i = 0; i < node->before_count; i++)
        if (!node->before[i]->ordered)
            return false;
    return true;
}

/* Orders the nodes of a graph. A node is made after those it depends on, so one pass is nearly always enough. */
CUresult cu_graph_order(CUgraph graph)
{
    free(graph->order);
    graph->order = calloc(graph->node_count + 1, sizeof(CUgraphNode));
    CU_CHECK(graph->order != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    for (CUgraphNode node = graph->first; node != NULL; node = node->next)
        node->ordered = false;
    size_t n = 0, passed = 1;
    while (n < graph->node_count && passed > 0) {
        passed = 0;
        for (CUgraphNode node = graph->first; node != NULL; node = node->next) {
            if (node->ordered || !is_ready(node))
                continue;
            node->ordered = true;
            graph->order[n++] = node;
            passed++;
        }
    }
    for (CUgraphNode node = graph->first; node != NULL && n == graph->node_count; node = node->next)
        if (node->type == CU_GRAPH_NODE_TYPE_GRAPH)
            CU_TRY(cu_graph_order(node->child));
    return n == graph->node_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* fewer nodes: the edges form a cycle */
}

/*
 * Lists nodes as every listing call of the API does. Without an array, the function sets *count to the number of nodes.
 * With an array, it writes at most *count nodes, fills the rest of the array with zeros, and lowers *count to the
 * number written.
 */
CUresult cu_list_nodes(CUgraphNode *out, size_t *count, CUgraphNode *all, size_t n)
{
    for (size_t i = 0; out != NULL && i < *count; i++)
        out[i] = i < n ? all[i] : NULL;
    if (out == NULL || *count > n)
        *count = n;
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    CU_TRY(cu_enter("cuGraphCreate"));
    CU_CHECK(graph != NULL && flags == 0, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    *graph = cu_graph_new();
    cu_unlock();
    return *graph == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
    CU_TRY(cu_enter("cuGraphDestroy"));
    CU_CHECK(cu_is_graph(graph) && graph->parent == NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    cu_graph_free(graph);
    cu_unlock();
    cu_objects_run();
    return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *clone, CUgraph original)
{
    CU_TRY(cu_enter("cuGraphClone"));
    CU_CHECK(clone != NULL && cu_is_graph(original), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(!original->has_memory, CUDA_ERROR_NOT_SUPPORTED);
    cu_lock();
    CUresult result = cu_graph_clone(original, false, clone);
    cu_unlock();
    return result;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
    CU_TRY(cu_enter("cuGraphNodeFindInClone"));
    CU_CHECK(out != NULL && cu_is_node(original) && cu_is_graph(clone), CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    *out = cu_graph_find_clone(clone, original);
    cu_unlock();
    return *out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    CU_TRY(cu_enter("cuGraphNodeGetType"));
    CU_CHECK(cu_is_node(node) && type != NULL, CUDA_ERROR_INVALID_VALUE);
    *type = node->type;
    return CUDA_SUCCESS;
}

static CUresult list_graph(CUgraph graph, CUgraphNode *out, size_t *count, bool roots)
{
    CU_CHECK(cu_is_graph(graph) && count != NULL, CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUgraphNode *all = calloc(graph->node_count + 1, sizeof(*all));
    size_t n = 0;
    for (CUgraphNode node = graph->first; all != NULL && node != NULL; node = node->next)
        if (!roots || node->before_count == 0)
            all[n++] = node;
    CUresult result = all == NULL ? CUDA_ERROR_OUT_OF_MEMORY : cu_list_nodes(out, count, all, n);
    cu_unlock();
    free(all);
    return result;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    CU_TRY(cu_enter("cuGraphGetNodes"));
    return list_graph(graph, nodes, count, false);
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    CU_TRY(cu_enter("cuGraphGetRootNodes"));
    return list_graph(graph, nodes, count, true);
}

CUresult cuGraphDestroyNode(CUgraphNode node)
{
    CU_TRY(cu_enter("cuGraphDestroyNode"));
    CU_CHECK(cu_is_node(node), CUDA_ERROR_INVALID_VALUE);
    CUgraph graph = node->graph;
    CU_CHECK(!graph->has_memory && graph->parent == NULL, CUDA_ERROR_NOT_SUPPORTED);
    cu_lock();
    for (CUgraphNode n = graph->first; n != NULL; n = n->next) {
        size_t kept = 0;
        for (size_t i = 0; i < n->before_count; i++)
            if (n->before[i] != node)
                n->before[kept++] = n->before[i];
        n->before_count = kept;
    }
    unlink_node(graph, node);
    free_node(node);
    cu_unlock();
    return CUDA_SUCCESS;
}
