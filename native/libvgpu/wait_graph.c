/* wait_graph.c: calls for graphs and their nodes, and for the memory that graphs hold: they need nothing of libvgpu but to
 * wait in front of the driver while the lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attr, void *value), device, attr, value)
WAITS(cuDeviceSetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attr, void *value), device, attr, value)
WAITS(cuGraphAddBatchMemOpNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddChildGraphNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       CUgraph childGraph),
      phGraphNode, hGraph, dependencies, numDependencies, childGraph)
WAITS(cuGraphAddDependencies, (CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies),
      hGraph, from, to, numDependencies)
WAITS(cuGraphAddDependencies_v2,
      (CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData,
       size_t numDependencies),
      hGraph, from, to, edgeData, numDependencies)
WAITS(cuGraphAddEmptyNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies), phGraphNode,
      hGraph, dependencies, numDependencies)
WAITS(cuGraphAddEventRecordNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       CUevent event),
      phGraphNode, hGraph, dependencies, numDependencies, event)
WAITS(cuGraphAddEventWaitNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       CUevent event),
      phGraphNode, hGraph, dependencies, numDependencies, event)
WAITS(cuGraphAddExternalSemaphoresSignalNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddExternalSemaphoresWaitNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddHostNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_HOST_NODE_PARAMS *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddKernelNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddKernelNode_v2,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_KERNEL_NODE_PARAMS *nodeParams),
      phGraphNode, hGraph, dependencies, numDependencies, nodeParams)
WAITS(cuGraphAddMemcpyNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_MEMCPY3D *copyParams, CUcontext ctx),
      phGraphNode, hGraph, dependencies, numDependencies, copyParams, ctx)
WAITS(cuGraphAddMemFreeNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       CUdeviceptr dptr),
      phGraphNode, hGraph, dependencies, numDependencies, dptr)
WAITS(cuGraphAddMemsetNode,
      (CUgraphNode * phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
       const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx),
      phGraphNode, hGraph, dependencies, numDependencies, memsetParams, ctx)
WAITS(cuGraphBatchMemOpNodeGetParams, (CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out), hNode,
      nodeParams_out)
WAITS(cuGraphBatchMemOpNodeSetParams, (CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams), hNode,
      nodeParams)
WAITS(cuGraphChildGraphNodeGetGraph, (CUgraphNode hNode, CUgraph *phGraph), hNode, phGraph)
WAITS(cuGraphClone, (CUgraph * phGraphClone, CUgraph originalGraph), phGraphClone, originalGraph)
WAITS(cuGraphConditionalHandleCreate,
      (CUgraphConditionalHandle * pHandle_out, CUgraph hGraph, CUcontext ctx, unsigned int defaultLaunchValue,
       unsigned int flags),
      pHandle_out, hGraph, ctx, defaultLaunchValue, flags)
WAITS(cuGraphCreate, (CUgraph * phGraph, unsigned int flags), phGraph, flags)
WAITS(cuGraphDebugDotPrint, (CUgraph hGraph, const char *path, unsigned int flags), hGraph, path, flags)
WAITS(cuGraphDestroy, (CUgraph hGraph), hGraph)
WAITS(cuGraphDestroyNode, (CUgraphNode hNode), hNode)
WAITS(cuGraphEventRecordNodeGetEvent, (CUgraphNode hNode, CUevent *event_out), hNode, event_out)
WAITS(cuGraphEventRecordNodeSetEvent, (CUgraphNode hNode, CUevent event), hNode, event)
WAITS(cuGraphEventWaitNodeGetEvent, (CUgraphNode hNode, CUevent *event_out), hNode, event_out)
WAITS(cuGraphEventWaitNodeSetEvent, (CUgraphNode hNode, CUevent event), hNode, event)
WAITS(cuGraphExecExternalSemaphoresSignalNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuGraphExecExternalSemaphoresWaitNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuGraphExecGetFlags, (CUgraphExec hGraphExec, cuuint64_t *flags), hGraphExec, flags)
WAITS(cuGraphExecUpdate,
      (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out),
      hGraphExec, hGraph, hErrorNode_out, updateResult_out)
WAITS(cuGraphExternalSemaphoresSignalNodeGetParams, (CUgraphNode hNode, CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *params_out),
      hNode, params_out)
WAITS(cuGraphExternalSemaphoresSignalNodeSetParams,
      (CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphExternalSemaphoresWaitNodeGetParams, (CUgraphNode hNode, CUDA_EXT_SEM_WAIT_NODE_PARAMS *params_out), hNode,
      params_out)
WAITS(cuGraphExternalSemaphoresWaitNodeSetParams, (CUgraphNode hNode, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams),
      hNode, nodeParams)
WAITS(cuGraphGetEdges, (CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges), hGraph, from, to,
      numEdges)
WAITS(cuGraphGetEdges_v2,
      (CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges), hGraph, from,
      to, edgeData, numEdges)
WAITS(cuGraphGetNodes, (CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes), hGraph, nodes, numNodes)
WAITS(cuGraphGetRootNodes, (CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes), hGraph, rootNodes,
      numRootNodes)
WAITS(cuGraphHostNodeGetParams, (CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphHostNodeSetParams, (CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphKernelNodeCopyAttributes, (CUgraphNode dst, CUgraphNode src), dst, src)
WAITS(cuGraphKernelNodeGetAttribute, (CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out),
      hNode, attr, value_out)
WAITS(cuGraphKernelNodeGetParams, (CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams), hNode, nodeParams)
WAITS(cuGraphKernelNodeGetParams_v2, (CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphKernelNodeSetAttribute, (CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value),
      hNode, attr, value)
WAITS(cuGraphKernelNodeSetParams, (CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams), hNode, nodeParams)
WAITS(cuGraphKernelNodeSetParams_v2, (CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphMemAllocNodeGetParams, (CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out), hNode, params_out)
WAITS(cuGraphMemcpyNodeGetParams, (CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams), hNode, nodeParams)
WAITS(cuGraphMemcpyNodeSetParams, (CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams), hNode, nodeParams)
WAITS(cuGraphMemFreeNodeGetParams, (CUgraphNode hNode, CUdeviceptr *dptr_out), hNode, dptr_out)
WAITS(cuGraphMemsetNodeGetParams, (CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphMemsetNodeSetParams, (CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams), hNode, nodeParams)
WAITS(cuGraphNodeFindInClone, (CUgraphNode * phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph), phNode,
      hOriginalNode, hClonedGraph)
WAITS(cuGraphNodeGetDependencies, (CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies), hNode,
      dependencies, numDependencies)
WAITS(cuGraphNodeGetDependencies_v2,
      (CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData, size_t *numDependencies), hNode,
      dependencies, edgeData, numDependencies)
WAITS(cuGraphNodeGetDependentNodes, (CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes), hNode,
      dependentNodes, numDependentNodes)
WAITS(cuGraphNodeGetDependentNodes_v2,
      (CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData, size_t *numDependentNodes), hNode,
      dependentNodes, edgeData, numDependentNodes)
WAITS(cuGraphNodeGetEnabled, (CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled), hGraphExec, hNode,
      isEnabled)
WAITS(cuGraphNodeGetType, (CUgraphNode hNode, CUgraphNodeType *type), hNode, type)
WAITS(cuGraphNodeSetParams, (CUgraphNode hNode, CUgraphNodeParams *nodeParams), hNode, nodeParams)
WAITS(cuGraphReleaseUserObject, (CUgraph graph, CUuserObject object, unsigned int count), graph, object, count)
WAITS(cuGraphRemoveDependencies,
      (CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies), hGraph, from, to,
      numDependencies)
WAITS(cuGraphRemoveDependencies_v2,
      (CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData,
       size_t numDependencies),
      hGraph, from, to, edgeData, numDependencies)
WAITS(cuGraphRetainUserObject, (CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags), graph,
      object, count, flags)
WAITS(cuUserObjectCreate,
      (CUuserObject * object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount, unsigned int flags),
      object_out, ptr, destroy, initialRefcount, flags)
WAITS(cuUserObjectRelease, (CUuserObject object, unsigned int count), object, count)
WAITS(cuUserObjectRetain, (CUuserObject object, unsigned int count), object, count)
