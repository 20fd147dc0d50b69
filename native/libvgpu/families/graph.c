/* graph.c: the calls that add memory nodes to graphs, and that instantiate, upload and destroy such graphs. */
#include "graph_memory.h"

#include "functions.h"
#include "suspended.h"

static void note_memory_node(const CUgraphNodeParams *parameters)
{
    if (parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        vgpu_graph_memory_made();
}

VGPU_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                            size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
    vgpu_suspended_call();
    vgpu_graph_memory_made();
    return CALL(cuGraphAddMemAllocNode, phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, CUgraphNodeParams *nodeParams)
{
    vgpu_suspended_call();
    note_memory_node(nodeParams);
    return CALL(cuGraphAddNode, phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams)
{
    vgpu_suspended_call();
    note_memory_node(nodeParams);
    return CALL(cuGraphAddNode_v2, phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams)
{
    vgpu_suspended_call();
    note_memory_node(nodeParams);
    return CALL(cuGraphAddNode_v3, phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
                                        char *logBuffer, size_t bufferSize)
{
    vgpu_suspended_call();
    return vgpu_graph_instantiated(CALL(cuGraphInstantiate, phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize),
                                   phGraphExec, hGraph);
}

VGPU_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
                                           char *logBuffer, size_t bufferSize)
{
    vgpu_suspended_call();
    return vgpu_graph_instantiated(CALL(cuGraphInstantiate_v2, phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize),
                                   phGraphExec, hGraph);
}

VGPU_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
    vgpu_suspended_call();
    return vgpu_graph_instantiated(CALL(cuGraphInstantiateWithFlags, phGraphExec, hGraph, flags), phGraphExec, hGraph);
}

#define INSTANTIATE_WITH_PARAMS(symbol)                                                                              \
    VGPU_EXPORT CUresult symbol(CUgraphExec *phGraphExec, CUgraph hGraph,                                            \
                                CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)                                    \
    {                                                                                                                \
        struct vgpu_graph_charge charge;                                                                             \
        vgpu_suspended_call();                                                                                       \
        CUresult result = vgpu_graph_begin_upload(&charge, hGraph, instantiateParams);                               \
        if (result != CUDA_SUCCESS)                                                                                  \
            return result;                                                                                           \
        result = vgpu_graph_instantiated(CALL(symbol, phGraphExec, hGraph, instantiateParams), phGraphExec, hGraph); \
        return vgpu_graph_end(&charge, result);                                                                      \
    }

INSTANTIATE_WITH_PARAMS(cuGraphInstantiateWithParams)
INSTANTIATE_WITH_PARAMS(cuGraphInstantiateWithParams_ptsz)

VGPU_EXPORT CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    vgpu_suspended_call();
    vgpu_graph_forget(hGraphExec);
    return CALL(cuGraphExecDestroy, hGraphExec);
}

#define UPLOAD(symbol, per_thread)                                                    \
    VGPU_EXPORT CUresult symbol(CUgraphExec hGraphExec, CUstream hStream)             \
    {                                                                                 \
        struct vgpu_graph_charge charge;                                              \
        vgpu_suspended_call();                                                        \
        CUresult result = vgpu_graph_begin(&charge, hGraphExec, hStream, per_thread); \
        if (result != CUDA_SUCCESS)                                                   \
            return result;                                                            \
        return vgpu_graph_end(&charge, CALL(symbol, hGraphExec, hStream));            \
    }

UPLOAD(cuGraphUpload, 0)
UPLOAD(cuGraphUpload_ptsz, 1)

VGPU_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    vgpu_suspended_call();
    return vgpu_graph_trim(device);
}
