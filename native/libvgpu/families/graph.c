#include "graph.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "suspended.h"
#include "capture.h"
#include "device.h"
#include "functions.h"
#include "in_child.h"
#include "driver_overhead.h"
#include "pool.h"
#include "source.h"
#include "tenant.h"

#define DEPTH_MAX 64     /* child graphs in child graphs */
#define NEVER UINT32_MAX /* marks a graph that was never launched */

/* What an executable graph can add, by device of the lease. */
struct vgpu_graph_need {
    uint64_t bytes[VGPU_MAX_DEVICES];
    uint32_t trims; /* the count of trims since which the graph's memory exists */
};

static uint32_t any_memory; /* a graph of this process may allocate */
static uint32_t trims;      /* counts trims: a graph whose memory was given back allocates it again */
static uint64_t charged[VGPU_MAX_DEVICES];
static CUdevice ordinals[VGPU_MAX_DEVICES]; /* ordinal plus 1; 0: no graph has allocated there */
static pthread_mutex_t settling = PTHREAD_MUTEX_INITIALIZER;

bool vgpu_graph_captures(CUstream stream, int per_thread)
{
    if (!vgpu_capture_on(stream, per_thread))
        return false;
    __atomic_store_n(&any_memory, 1, __ATOMIC_RELAXED);
    return true;
}

static bool settle(int device)
{
    cuuint64_t held = 0;
    CUdevice ordinal = __atomic_load_n(&ordinals[device], __ATOMIC_RELAXED) - 1;
    if (ordinal < 0)
        return true;
    pthread_mutex_lock(&settling);
    uint64_t before = charged[device];
    if (CALL(cuDeviceGetGraphMemAttribute, ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &held) != CUDA_SUCCESS)
        held = before;
    if (held > before)
        vgpu_account_add(vgpu_tenant_account(), (unsigned)device, held - before);
    else if (held < before)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)device, before - held);
    charged[device] = held;
    pthread_mutex_unlock(&settling);
    if (held != before)
        vgpu_overhead_changed();
    return held == before;
}

static const struct vgpu_source graph_source = {.settle = settle};
VGPU_SOURCE(graph_source);

/* What one allocation node can add, and where. */
static void add_node(CUgraphNode node, struct vgpu_graph_need *need)
{
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
    if (CALL(cuGraphMemAllocNodeGetParams, node, &parameters) != CUDA_SUCCESS ||
        parameters.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return;
    int device = vgpu_device_index(parameters.poolProps.location.id);
    if (device == VGPU_NOT_IN_LEASE)
        return;
    __atomic_store_n(&ordinals[device], parameters.poolProps.location.id + 1, __ATOMIC_RELAXED);
    need->bytes[device] += vgpu_round(parameters.bytesize, VGPU_POOL_GRAIN);
}

static void add_graph(CUgraph graph, struct vgpu_graph_need *need, int depth)
{
    size_t count = 0;
    if (depth > DEPTH_MAX || CALL(cuGraphGetNodes, graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    CUgraphNode *nodes = calloc(count, sizeof(*nodes));
    if (nodes == NULL || CALL(cuGraphGetNodes, graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (CALL(cuGraphNodeGetType, nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            add_node(nodes[i], need);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                 CALL(cuGraphChildGraphNodeGetGraph, nodes[i], &child) == CUDA_SUCCESS)
            add_graph(child, need, depth + 1);
    }
    free(nodes);
}

static bool needs_any(const struct vgpu_graph_need *need)
{
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++)
        if (need->bytes[d] > 0)
            return true;
    return false;
}

/* Records what an executable graph can add. */
static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph)
{
    bool limited;
    if (result != CUDA_SUCCESS || __atomic_load_n(&any_memory, __ATOMIC_RELAXED) == 0 ||
        vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return result;
    struct vgpu_graph_need *need = calloc(1, sizeof(*need));
    if (need == NULL)
        return result; /* its memory is counted after each launch */
    need->trims = NEVER;
    add_graph(graph, need, 0);
    struct vgpu_entry entry = {.kind = VGPU_KIND_GRAPH, .key = (uint64_t)(uintptr_t)*exec, .owner = need};
    if (!needs_any(need) || !vgpu_table_put(&entry))
        free(need);
    return result;
}

static void undo(struct vgpu_graph_charge *charge, CUresult result)
{
    for (unsigned i = 0; i < charge->count; i++) {
        settle(charge->of[i].device);
        vgpu_charge_undo(&charge->of[i], result);
    }
}

static CUresult claim(struct vgpu_graph_charge *charge, const struct vgpu_graph_need *need, bool resident)
{
    for (int d = 0; d < (int)VGPU_MAX_DEVICES; d++) {
        if (need->bytes[d] == 0)
            continue;
        CUresult result = vgpu_charge_index(&charge->of[charge->count], d, resident ? 0 : need->bytes[d]);
        if (result != CUDA_SUCCESS) {
            undo(charge, result);
            return result;
        }
        charge->count++;
    }
    return CUDA_SUCCESS;
}

CUresult vgpu_graph_begin(struct vgpu_graph_charge *charge, CUgraphExec exec)
{
    struct vgpu_entry entry;
    charge->count = 0;
    charge->need = NULL;
    if (__atomic_load_n(&any_memory, __ATOMIC_RELAXED) == 0 ||
        !vgpu_table_get(VGPU_KIND_GRAPH, (uint64_t)(uintptr_t)exec, &entry))
        return CUDA_SUCCESS;
    struct vgpu_graph_need *need = entry.owner;
    /* read before the launch, because the memory may be trimmed right after it */
    uint32_t now = __atomic_load_n(&trims, __ATOMIC_SEQ_CST);
    CUresult result = claim(charge, need, __atomic_load_n(&need->trims, __ATOMIC_RELAXED) == now);
    if (result == CUDA_SUCCESS) {
        __atomic_store_n(&need->trims, now, __ATOMIC_RELAXED);
        charge->need = need;
    }
    return result;
}

CUresult vgpu_graph_end(struct vgpu_graph_charge *charge, CUresult result)
{
    undo(charge, result);
    if (charge->need != NULL && result != CUDA_SUCCESS)
        __atomic_store_n(&charge->need->trims, NEVER, __ATOMIC_RELAXED);
    return result;
}

static void reset(void)
{
    pthread_mutex_init(&settling, NULL);
    memset(charged, 0, sizeof(charged));
    memset(ordinals, 0, sizeof(ordinals));
    any_memory = 0;
}
VGPU_IN_CHILD(reset);

static void note_memory_node(const CUgraphNodeParams *parameters)
{
    if (parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        __atomic_store_n(&any_memory, 1, __ATOMIC_RELAXED);
}

VGPU_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                            size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
    vgpu_suspended_call();
    __atomic_store_n(&any_memory, 1, __ATOMIC_RELAXED);
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
    return instantiated(CALL(cuGraphInstantiate, phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize), phGraphExec,
                        hGraph);
}

VGPU_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
                                           char *logBuffer, size_t bufferSize)
{
    vgpu_suspended_call();
    return instantiated(CALL(cuGraphInstantiate_v2, phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize),
                        phGraphExec, hGraph);
}

VGPU_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
    vgpu_suspended_call();
    return instantiated(CALL(cuGraphInstantiateWithFlags, phGraphExec, hGraph, flags), phGraphExec, hGraph);
}

/* The call may upload the graph, and so allocate, at once: it is claimed as for a launch. */
static CUresult upload_begin(struct vgpu_graph_charge *charge, CUgraph graph, const CUDA_GRAPH_INSTANTIATE_PARAMS *how)
{
    struct vgpu_graph_need need = {0};
    bool limited;
    charge->count = 0;
    charge->need = NULL;
    if (how == NULL || (how->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) == 0 ||
        __atomic_load_n(&any_memory, __ATOMIC_RELAXED) == 0 || vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited)
        return CUDA_SUCCESS;
    add_graph(graph, &need, 0);
    return claim(charge, &need, false);
}

#define INSTANTIATE_WITH_PARAMS(symbol)                                                                   \
    VGPU_EXPORT CUresult symbol(CUgraphExec *phGraphExec, CUgraph hGraph,                                 \
                                CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)                         \
    {                                                                                                     \
        struct vgpu_graph_charge charge;                                                                  \
        vgpu_suspended_call();                                                                            \
        CUresult result = upload_begin(&charge, hGraph, instantiateParams);                               \
        if (result != CUDA_SUCCESS)                                                                       \
            return result;                                                                                \
        result = instantiated(CALL(symbol, phGraphExec, hGraph, instantiateParams), phGraphExec, hGraph); \
        return vgpu_graph_end(&charge, result);                                                           \
    }

INSTANTIATE_WITH_PARAMS(cuGraphInstantiateWithParams)
INSTANTIATE_WITH_PARAMS(cuGraphInstantiateWithParams_ptsz)

VGPU_EXPORT CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    vgpu_suspended_call();
    struct vgpu_entry entry;
    if (__atomic_load_n(&any_memory, __ATOMIC_RELAXED) != 0 &&
        vgpu_table_take(VGPU_KIND_GRAPH, (uint64_t)(uintptr_t)hGraphExec, &entry))
        free(entry.owner);
    return CALL(cuGraphExecDestroy, hGraphExec);
}

#define UPLOAD(symbol)                                                     \
    VGPU_EXPORT CUresult symbol(CUgraphExec hGraphExec, CUstream hStream)  \
    {                                                                      \
        struct vgpu_graph_charge charge;                                   \
        vgpu_suspended_call();                                             \
        CUresult result = vgpu_graph_begin(&charge, hGraphExec);           \
        if (result != CUDA_SUCCESS)                                        \
            return result;                                                 \
        return vgpu_graph_end(&charge, CALL(symbol, hGraphExec, hStream)); \
    }

UPLOAD(cuGraphUpload)
UPLOAD(cuGraphUpload_ptsz)

VGPU_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    vgpu_suspended_call();
    bool limited;
    /* counted before and after, because a launch in between may lose its memory */
    __atomic_fetch_add(&trims, 1, __ATOMIC_SEQ_CST);
    CUresult result = CALL(cuDeviceGraphMemTrim, device);
    __atomic_fetch_add(&trims, 1, __ATOMIC_SEQ_CST);
    if (vgpu_tenant_enter(&limited) == CUDA_SUCCESS && limited && vgpu_device_index(device) != VGPU_NOT_IN_LEASE)
        settle(vgpu_device_index(device));
    return result;
}
