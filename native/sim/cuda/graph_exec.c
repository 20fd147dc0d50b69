/* Instantiates graphs and runs them: node by node, in an order that the edges allow, on the stream of the launch. */
#include "graph.h"

static bool is_exec(CUgraphExec exec)
{
    return exec != NULL && exec->magic == CU_EXEC;
}

CUresult cu_check_exec(CUgraphExec exec)
{
    CU_CHECK(is_exec(exec), CUDA_ERROR_INVALID_VALUE);
    return exec->owner.ctx == NULL || cu_owned(&exec->owner) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* Refuses a graph with a kernel of a context that has ended. An H200's driver crashes on such a kernel. */
static CUresult check_kernels(CUgraph graph)
{
    for (CUgraphNode n = graph->first; n != NULL; n = n->next)
        if (n->type == CU_GRAPH_NODE_TYPE_KERNEL && !cu_is_function(n->kernel.func))
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return CUDA_SUCCESS;
}

CUresult cu_graph_instantiate(CUgraph graph, cuuint64_t flags, CUgraphExec *out)
{
    const cuuint64_t known = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                             CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    CU_CHECK(out != NULL && cu_is_graph(graph), CUDA_ERROR_INVALID_VALUE);
    CU_CHECK((flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) == 0, CUDA_ERROR_NOT_SUPPORTED);
    CU_CHECK((flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(!graph->has_memory || graph->execs == NULL, CUDA_ERROR_NOT_SUPPORTED);
    CU_TRY(check_kernels(graph));
    CU_TRY(cu_graph_order(graph));
    CUgraphExec exec = calloc(1, sizeof(*exec));
    CU_CHECK(exec != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = cu_graph_clone(graph, true, &exec->graph);
    if (result == CUDA_SUCCESS)
        result = cu_graph_order(exec->graph);
    if (result != CUDA_SUCCESS) {
        free(exec);
        return result;
    }
    exec->magic = CU_EXEC;
    if (cu_is_context(cu_current()))
        exec->owner = cu_owner_of(cu_current());
    exec->source = graph;
    exec->flags = flags;
    exec->next = graph->execs;
    graph->execs = exec;
    *out = exec;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    CU_TRY(cu_enter("cuGraphInstantiateWithFlags"));
    cu_lock();
    CUresult result = cu_graph_instantiate(graph, flags, exec);
    cu_unlock();
    return result;
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_bytes)
{
    if (error != NULL)
        *error = NULL;
    if (log != NULL && log_bytes > 0)
        log[0] = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_bytes)
{
    return cuGraphInstantiate_v2(exec, graph, error, log, log_bytes);
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    CU_TRY(cu_enter("cuGraphExecDestroy"));
    CU_TRY(cu_check_exec(exec));
    cu_lock();
    if (exec->source != NULL) {
        CUgraphExec *at = &exec->source->execs;
        while (*at != exec)
            at = &(*at)->next;
        *at = exec->next;
    }
    cu_graph_free(exec->graph);
    exec->magic = CU_DEAD;
    cu_unlock();
    free(exec);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags)
{
    CU_TRY(cu_enter("cuGraphExecGetFlags"));
    CU_CHECK(is_exec(exec) && flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

static bool may_disable(CUgraphNode node)
{
    return node->type == CU_GRAPH_NODE_TYPE_KERNEL || node->type == CU_GRAPH_NODE_TYPE_MEMCPY ||
           node->type == CU_GRAPH_NODE_TYPE_MEMSET;
}

static CUresult enabled_node(CUgraphExec exec, CUgraphNode node, CUgraphNode *out)
{
    CU_CHECK(is_exec(exec) && cu_is_node(node), CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    *out = cu_graph_find_clone(exec->graph, node);
    cu_unlock();
    return *out != NULL && may_disable(*out) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled)
{
    CUgraphNode found;
    CU_TRY(cu_enter("cuGraphNodeSetEnabled"));
    CU_TRY(enabled_node(exec, node, &found));
    found->disabled = enabled == 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled)
{
    CUgraphNode found;
    CU_TRY(cu_enter("cuGraphNodeGetEnabled"));
    CU_CHECK(enabled != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(enabled_node(exec, node, &found));
    *enabled = !found->disabled;
    return CUDA_SUCCESS;
}

/* Updates an instantiated graph from a graph of the same shape. */

static CUresult differs(CUgraphExecUpdateResultInfo *info, CUgraphExecUpdateResult why, CUgraphNode node)
{
    *info = (CUgraphExecUpdateResultInfo){.result = why, .errorNode = node};
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

static CUresult take_params(CUgraphNode to, CUgraphNode from, CUgraphExecUpdateResultInfo *info)
{
    if (to->type != from->type)
        return differs(info, CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, from);
    if (to->before_count != from->before_count)
        return differs(info, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, from);
    switch (to->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        to->kernel = from->kernel;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        to->copy.shape = from->copy.shape;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        to->set.shape = from->set.shape;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
        to->host = from->host;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        to->event = from->event;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return differs(info, CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, from);
    default:
        return CUDA_SUCCESS;
    }
}

static CUresult update(CUgraph to, CUgraph from, CUgraphExecUpdateResultInfo *info)
{
    if (to->node_count != from->node_count)
        return differs(info, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, NULL);
    CUgraphNode a = to->first, b = from->first;
    for (; a != NULL; a = a->next, b = b->next) {
        CU_TRY(take_params(a, b, info));
        if (a->type == CU_GRAPH_NODE_TYPE_GRAPH)
            CU_TRY(update(a->child, b->child, info));
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
    CU_TRY(cu_enter("cuGraphExecUpdate_v2"));
    CU_CHECK(is_exec(exec) && cu_is_graph(graph) && info != NULL, CUDA_ERROR_INVALID_VALUE);
    *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_SUCCESS};
    cu_lock();
    CUresult result = update(exec->graph, graph, info);
    cu_unlock();
    return result;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, CUgraphExecUpdateResult *why)
{
    CUgraphExecUpdateResultInfo info = {.result = CU_GRAPH_EXEC_UPDATE_ERROR};
    CUresult result = cuGraphExecUpdate_v2(exec, graph, &info);
    if (error != NULL)
        *error = info.errorNode;
    if (why != NULL)
        *why = info.result;
    return result;
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child)
{
    CUgraphExecUpdateResultInfo info;
    CU_TRY(cu_enter("cuGraphExecChildGraphNodeSetParams"));
    CU_CHECK(is_exec(exec) && cu_is_node(node) && cu_is_graph(child), CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUgraphNode found = cu_graph_find_clone(exec->graph, node);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (found != NULL && found->type == CU_GRAPH_NODE_TYPE_GRAPH)
        result = update(found->child, child, &info) == CUDA_SUCCESS ? CUDA_SUCCESS : result;
    cu_unlock();
    return result;
}

/* Runs the nodes of a graph. */

static CUresult run_kernel(const CUDA_KERNEL_NODE_PARAMS *p, CUstream stream)
{
    return cu_launch(p->func, (unsigned int[]){p->gridDimX, p->gridDimY, p->gridDimZ},
                     (unsigned int[]){p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes, stream);
}

static CUresult run_alloc(struct cu_graph_memory *memory)
{
    cu_lock();
    CUresult result = cu_graph_memory_take(memory);
    cu_unlock();
    return result;
}

static CUresult run_free(CUdeviceptr p)
{
    cu_lock();
    CUresult result = cu_free(p);
    cu_unlock();
    return result;
}

static CUresult run_host(const CUDA_HOST_NODE_PARAMS *p, CUstream stream)
{
    CUcontext ctx;
    double position;
    CU_TRY(cu_stream_resolve(stream, &ctx, &position));
    CU_TRY(cu_wait(ctx, position));
    p->fn(p->userData);
    return CUDA_SUCCESS;
}

static CUresult run_graph(CUgraph graph, CUstream stream);

static CUresult run_node(CUgraphNode node, CUstream stream)
{
    const CUDA_MEMSET_NODE_PARAMS *set = &node->set.shape;
    if (node->disabled)
        return CUDA_SUCCESS;
    switch (node->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return run_kernel(&node->kernel, stream);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return cu_copy_3d(&node->copy.shape);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return cu_fill_rows(set->dst, set->pitch, &set->value, set->elementSize, set->width, set->height);
    case CU_GRAPH_NODE_TYPE_HOST:
        return run_host(&node->host, stream);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return run_graph(node->child, stream);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return cu_event_record(node->event, stream);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return cu_event_wait(node->event, stream);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return run_alloc(node->alloc.memory);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return run_free(node->free);
    default:
        return CUDA_SUCCESS;
    }
}

static CUresult run_graph(CUgraph graph, CUstream stream)
{
    for (size_t i = 0; i < graph->node_count; i++)
        CU_TRY(run_node(graph->order[i], stream));
    return CUDA_SUCCESS;
}

/* Returns true if allocations of this graph are still live. With `drop`, the function frees them. */
static bool holds_memory(CUgraph graph, bool drop)
{
    bool held = false;
    for (CUgraphNode n = graph->has_memory ? graph->first : NULL; n != NULL; n = n->next) {
        if (n->type == CU_GRAPH_NODE_TYPE_GRAPH)
            held = holds_memory(n->child, drop) || held;
        if (n->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || !n->alloc.memory->live)
            continue;
        held = true;
        if (drop)
            cu_free(n->alloc.memory->address);
    }
    return held;
}

CUresult cu_graph_launch(CUgraphExec exec, CUstream stream)
{
    CU_TRY(cu_check_exec(exec));
    bool frees = (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) != 0;
    cu_lock();
    bool held = holds_memory(exec->graph, frees);
    cu_unlock();
    CU_CHECK(!held || frees, CUDA_ERROR_INVALID_VALUE);
    CUresult result = run_graph(exec->graph, stream);
    if (result == CUDA_SUCCESS || !exec->graph->has_memory)
        return result;
    cu_lock();
    /* frees all memory that this launch took: a launch succeeds as a whole or not at all */
    holds_memory(exec->graph, true);
    cu_unlock();
    return result;
}
