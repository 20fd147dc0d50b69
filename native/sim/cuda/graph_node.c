/* Graph nodes by type: functions that add them, and their parameters in graphs and in instantiated graphs. */
#include "graph.h"

static CUresult check_kernel(CUDA_KERNEL_NODE_PARAMS *p)
{
    if (p->func == NULL && p->kern != NULL)
        CU_TRY(cuKernelGetFunction(&p->func, p->kern));
    CU_CHECK(cu_is_function(p->func), CUDA_ERROR_INVALID_VALUE);
    return cu_launch_check(p->func, (unsigned int[]){p->gridDimX, p->gridDimY, p->gridDimZ},
                           (unsigned int[]){p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes);
}

static CUresult check_set(const CUDA_MEMSET_NODE_PARAMS *p)
{
    CU_CHECK(p->dst != 0 && p->width > 0 && p->height > 0, CUDA_ERROR_INVALID_VALUE);
    return p->elementSize == 1 || p->elementSize == 2 || p->elementSize == 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult add(CUgraph graph, CUgraphNodeType type, const CUgraphNode *before, size_t count, CUgraphNode *out)
{
    cu_lock();
    CUresult result = cu_graph_add(graph, type, before, count, out);
    cu_unlock();
    return result;
}

static bool has_type(CUgraphNode node, CUgraphNodeType type)
{
    return cu_is_node(node) && node->type == type;
}

/* Returns the node of `exec` that was made from `node` of the source graph; NULL if no node of this type was. */
static CUgraphNode in_exec(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type)
{
    if (exec == NULL || exec->magic != CU_EXEC || !has_type(node, type))
        return NULL;
    cu_lock();
    CUgraphNode found = cu_graph_find_clone(exec->graph, node);
    cu_unlock();
    return found;
}

/* Kernel nodes. */

CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphAddKernelNode_v2"));
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p = *params;
    CU_TRY(check_kernel(&p));
    CU_TRY(add(graph, CU_GRAPH_NODE_TYPE_KERNEL, before, count, out));
    (*out)->kernel = p;
    return CUDA_SUCCESS;
}

static CUDA_KERNEL_NODE_PARAMS widen(const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
    CUDA_KERNEL_NODE_PARAMS wide = {.func = p->func};
    memcpy(&wide, p, sizeof(*p)); /* the parameters of version 2 are those of version 1 with two more fields */
    return wide;
}

CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p = widen(params);
    return cuGraphAddKernelNode_v2(out, graph, before, count, &p);
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphKernelNodeGetParams_v2"));
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_KERNEL) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    *params = node->kernel;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
    CUDA_KERNEL_NODE_PARAMS p;
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cuGraphKernelNodeGetParams_v2(node, &p));
    memcpy(params, &p, sizeof(*params));
    return CUDA_SUCCESS;
}

static CUresult set_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_KERNEL) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p = *params;
    CU_TRY(check_kernel(&p));
    node->kernel = p;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphKernelNodeSetParams_v2"));
    return set_kernel(node, params);
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p = widen(params);
    return cuGraphKernelNodeSetParams_v2(node, &p);
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphExecKernelNodeSetParams_v2"));
    return set_kernel(in_exec(exec, node, CU_GRAPH_NODE_TYPE_KERNEL), params);
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
    CU_CHECK(params != NULL, CUDA_ERROR_INVALID_VALUE);
    CUDA_KERNEL_NODE_PARAMS p = widen(params);
    return cuGraphExecKernelNodeSetParams_v2(exec, node, &p);
}

/* Copy nodes. */

CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                              const CUDA_MEMCPY3D *params, CUcontext ctx)
{
    CU_TRY(cu_enter("cuGraphAddMemcpyNode"));
    CU_CHECK(params != NULL && cu_is_context(ctx), CUDA_ERROR_INVALID_VALUE);
    CU_TRY(add(graph, CU_GRAPH_NODE_TYPE_MEMCPY, before, count, out));
    (*out)->copy.shape = *params;
    (*out)->copy.ctx = ctx;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *params)
{
    CU_TRY(cu_enter("cuGraphMemcpyNodeGetParams"));
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_MEMCPY) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    *params = node->copy.shape;
    return CUDA_SUCCESS;
}

static CUresult set_copy(CUgraphNode node, const CUDA_MEMCPY3D *params)
{
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_MEMCPY) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    node->copy.shape = *params;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *params)
{
    CU_TRY(cu_enter("cuGraphMemcpyNodeSetParams"));
    return set_copy(node, params);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params, CUcontext ctx)
{
    (void)ctx;
    CU_TRY(cu_enter("cuGraphExecMemcpyNodeSetParams"));
    return set_copy(in_exec(exec, node, CU_GRAPH_NODE_TYPE_MEMCPY), params);
}

/* Fill nodes. */

CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS *params, CUcontext ctx)
{
    CU_TRY(cu_enter("cuGraphAddMemsetNode"));
    CU_CHECK(params != NULL && cu_is_context(ctx), CUDA_ERROR_INVALID_VALUE);
    CU_TRY(check_set(params));
    CU_TRY(add(graph, CU_GRAPH_NODE_TYPE_MEMSET, before, count, out));
    (*out)->set.shape = *params;
    (*out)->set.ctx = ctx;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphMemsetNodeGetParams"));
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_MEMSET) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    *params = node->set.shape;
    return CUDA_SUCCESS;
}

static CUresult set_set(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params)
{
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_MEMSET) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(check_set(params));
    node->set.shape = *params;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphMemsetNodeSetParams"));
    return set_set(node, params);
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params,
                                        CUcontext ctx)
{
    (void)ctx;
    CU_TRY(cu_enter("cuGraphExecMemsetNodeSetParams"));
    return set_set(in_exec(exec, node, CU_GRAPH_NODE_TYPE_MEMSET), params);
}

/* Host function nodes. */

CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                            const CUDA_HOST_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphAddHostNode"));
    CU_CHECK(params != NULL && params->fn != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(add(graph, CU_GRAPH_NODE_TYPE_HOST, before, count, out));
    (*out)->host = *params;
    return CUDA_SUCCESS;
}

CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphHostNodeGetParams"));
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_HOST) && params != NULL, CUDA_ERROR_INVALID_VALUE);
    *params = node->host;
    return CUDA_SUCCESS;
}

static CUresult set_host(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params)
{
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_HOST) && params != NULL && params->fn != NULL, CUDA_ERROR_INVALID_VALUE);
    node->host = *params;
    return CUDA_SUCCESS;
}

CUresult cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphHostNodeSetParams"));
    return set_host(node, params);
}

CUresult cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_HOST_NODE_PARAMS *params)
{
    CU_TRY(cu_enter("cuGraphExecHostNodeSetParams"));
    return set_host(in_exec(exec, node, CU_GRAPH_NODE_TYPE_HOST), params);
}

/* Child graph nodes, empty nodes and event nodes. */

CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                                  CUgraph child)
{
    CUgraph copy;
    CU_TRY(cu_enter("cuGraphAddChildGraphNode"));
    CU_CHECK(cu_is_graph(child) && child != graph, CUDA_ERROR_INVALID_VALUE);
    CU_CHECK(!child->has_memory, CUDA_ERROR_NOT_SUPPORTED);
    cu_lock();
    CUresult result = cu_graph_clone(child, false, &copy);
    if (result == CUDA_SUCCESS) {
        result = cu_graph_add(graph, CU_GRAPH_NODE_TYPE_GRAPH, before, count, out);
        if (result == CUDA_SUCCESS) {
            (*out)->child = copy;
            copy->parent = *out;
        } else {
            cu_graph_free(copy);
        }
    }
    cu_unlock();
    return result;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    CU_TRY(cu_enter("cuGraphChildGraphNodeGetGraph"));
    CU_CHECK(has_type(node, CU_GRAPH_NODE_TYPE_GRAPH) && graph != NULL, CUDA_ERROR_INVALID_VALUE);
    *graph = node->child;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count)
{
    CU_TRY(cu_enter("cuGraphAddEmptyNode"));
    return add(graph, CU_GRAPH_NODE_TYPE_EMPTY, before, count, out);
}

static CUresult add_event(CUgraphNode *out, CUgraph graph, CUgraphNodeType type, const CUgraphNode *before,
                          size_t count, CUevent event)
{
    CU_CHECK(event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(add(graph, type, before, count, out));
    (*out)->event = event;
    return CUDA_SUCCESS;
}

static CUresult set_event(CUgraphNode node, CUgraphNodeType type, CUevent event)
{
    CU_CHECK(has_type(node, type) && event != NULL && event->magic == CU_EVENT, CUDA_ERROR_INVALID_VALUE);
    node->event = event;
    return CUDA_SUCCESS;
}

static CUresult get_event(CUgraphNode node, CUgraphNodeType type, CUevent *event)
{
    CU_CHECK(has_type(node, type) && event != NULL, CUDA_ERROR_INVALID_VALUE);
    *event = node->event;
    return CUDA_SUCCESS;
}

#define EVENT_NODE(kind, type)                                                                                     \
    CUresult cuGraphAddEvent##kind##Node(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, \
                                         CUevent event)                                                            \
    {                                                                                                              \
        CU_TRY(cu_enter("cuGraphAddEvent" #kind "Node"));                                                          \
        return add_event(out, graph, type, before, count, event);                                                  \
    }                                                                                                              \
    CUresult cuGraphEvent##kind##NodeGetEvent(CUgraphNode node, CUevent *event)                                    \
    {                                                                                                              \
        CU_TRY(cu_enter("cuGraphEvent" #kind "NodeGetEvent"));                                                     \
        return get_event(node, type, event);                                                                       \
    }                                                                                                              \
    CUresult cuGraphEvent##kind##NodeSetEvent(CUgraphNode node, CUevent event)                                     \
    {                                                                                                              \
        CU_TRY(cu_enter("cuGraphEvent" #kind "NodeSetEvent"));                                                     \
        return set_event(node, type, event);                                                                       \
    }                                                                                                              \
    CUresult cuGraphExecEvent##kind##NodeSetEvent(CUgraphExec exec, CUgraphNode node, CUevent event)               \
    {                                                                                                              \
        CU_TRY(cu_enter("cuGraphExecEvent" #kind "NodeSetEvent"));                                                 \
        return set_event(in_exec(exec, node, type), type, event);                                                  \
    }

EVENT_NODE(Record, CU_GRAPH_NODE_TYPE_EVENT_RECORD)
EVENT_NODE(Wait, CU_GRAPH_NODE_TYPE_WAIT_EVENT)

/* Adds a node of any type. Version 2 of the call adds edge data. */

static CUresult add_any(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count, CUgraphNodeParams *p)
{
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMSET_NODE_PARAMS fill;
    CUDA_HOST_NODE_PARAMS host;
    CUDA_MEM_ALLOC_NODE_PARAMS alloc;
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        memcpy(&kernel, &p->kernel, sizeof(kernel));
        return cuGraphAddKernelNode_v2(out, graph, before, count, &kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return cuGraphAddMemcpyNode(out, graph, before, count, &p->memcpy.copyParams, p->memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        memcpy(&fill, &p->memset, sizeof(fill));
        return cuGraphAddMemsetNode(out, graph, before, count, &fill,
                                    p->memset.ctx == NULL ? cu_current() : p->memset.ctx);
    case CU_GRAPH_NODE_TYPE_HOST:
        host = (CUDA_HOST_NODE_PARAMS){p->host.fn, p->host.userData};
        return cuGraphAddHostNode(out, graph, before, count, &host);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        CU_TRY(cuGraphAddChildGraphNode(out, graph, before, count, p->graph.graph));
        p->graph.graph = (*out)->child;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return cuGraphAddEmptyNode(out, graph, before, count);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return cuGraphAddEventRecordNode(out, graph, before, count, p->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return cuGraphAddEventWaitNode(out, graph, before, count, p->eventWait.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        memcpy(&alloc, &p->alloc, sizeof(alloc));
        CU_TRY(cuGraphAddMemAllocNode(out, graph, before, count, &alloc));
        p->alloc.dptr = alloc.dptr;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return cuGraphAddMemFreeNode(out, graph, before, count, p->free.dptr);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, const CUgraphEdgeData *data,
                           size_t count, CUgraphNodeParams *params)
{
    CU_TRY(cu_enter("cuGraphAddNode_v2"));
    CU_CHECK(out != NULL && params != NULL, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; data != NULL && i < count; i++)
        CU_CHECK(data[i].from_port == 0 && data[i].to_port == 0 && data[i].type == 0, CUDA_ERROR_NOT_SUPPORTED);
    return add_any(out, graph, before, count, params);
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *before, size_t count,
                        CUgraphNodeParams *params)
{
    return cuGraphAddNode_v2(out, graph, before, NULL, count, params);
}
