/* graph.c: memory allocation nodes, refused in this version (see hooks.def). */
#include "functions.h"
#include "tenant.h"

static CUresult refusal(bool allocates)
{
    bool limited;
    CUresult result = vgpu_tenant_enter(&limited);
    return result == CUDA_SUCCESS && limited && allocates ? CUDA_ERROR_NOT_SUPPORTED : result;
}

static bool allocates(const CUgraphNodeParams *parameters)
{
    return parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
}

VGPU_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                            size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
    CUresult refused = refusal(true);
    if (refused != CUDA_SUCCESS)
        return refused;
    return CALL(cuGraphAddMemAllocNode, phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, CUgraphNodeParams *nodeParams)
{
    CUresult refused = refusal(allocates(nodeParams));
    if (refused != CUDA_SUCCESS)
        return refused;
    return CALL(cuGraphAddNode, phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
}

VGPU_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                       CUgraphNodeParams *nodeParams)
{
    CUresult refused = refusal(allocates(nodeParams));
    if (refused != CUDA_SUCCESS)
        return refused;
    return CALL(cuGraphAddNode_v2, phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}
