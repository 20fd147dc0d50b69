/*
 * fake_graph.c: memory that the driver allocates by itself, for graphs with memory nodes, modules, local memory and
 * streams. A module is a text "GLOBALS LOCAL": the bytes of its global variables, and of each thread's local memory.
 */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>

#define NODES 16
#define GRAIN (32ull << 20)
#define THREADS 1024u /* threads that the device runs at once */
#define STREAM_BYTES (1ull << 20)

struct CUgraphNode_st {
    CUDA_MEM_ALLOC_NODE_PARAMS parameters;
};
struct CUgraph_st {
    struct CUgraphNode_st nodes[NODES];
    size_t count;
};
struct CUgraphExec_st {
    uint64_t need;
};
struct CUmod_st {
    unsigned long long globals, local;
};

static uint64_t graph_bytes;
static size_t stack_bytes = 1024;

API CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    (void)flags;
    *graph = calloc(1, sizeof(**graph));
    return CUDA_SUCCESS;
}

API CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t number,
                                    CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    (void)dependencies, (void)number;
    *node = &graph->nodes[graph->count++];
    (*node)->parameters = *parameters;
    return CUDA_SUCCESS;
}

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    for (size_t i = 0; nodes != NULL && i < *count && i < graph->count; i++)
        nodes[i] = &graph->nodes[i];
    *count = graph->count;
    return CUDA_SUCCESS;
}

API CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    (void)node;
    *type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    return CUDA_SUCCESS;
}

API CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *parameters)
{
    *parameters = node->parameters;
    return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    *exec = calloc(1, sizeof(**exec));
    for (size_t i = 0; i < graph->count; i++)
        (*exec)->need += graph->nodes[i].parameters.bytesize;
    return CUDA_SUCCESS;
}

/* the fake device runs graphs one after another, so the largest graph's memory is the driver's */
static void hold(uint64_t bytes)
{
    uint64_t need = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&fake_mutex);
    if (need > graph_bytes) {
        fake_count(0, need - graph_bytes);
        graph_bytes = need;
    }
    pthread_mutex_unlock(&fake_mutex);
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *how)
{
    CUresult result = cuGraphInstantiateWithFlags(exec, graph, how->flags);
    if (how->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        hold((*exec)->need);
    return result;
}

API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    free(exec);
    return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    hold(exec->need);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    pthread_mutex_lock(&fake_mutex);
    fake_uncount(device, graph_bytes);
    graph_bytes = 0;
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *value)
{
    (void)which;
    *(cuuint64_t *)value = device == 0 ? graph_bytes : 0;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    struct CUmod_st loaded = {0, 0};
    NEED_CONTEXT(void) sscanf(image, "%llu %llu", &loaded.globals, &loaded.local);
    *module = malloc(sizeof(loaded));
    **module = loaded;
    pthread_mutex_lock(&fake_mutex);
    fake_count(fake_device(), loaded.globals);
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule module)
{
    pthread_mutex_lock(&fake_mutex);
    fake_uncount(fake_device(), module->globals);
    pthread_mutex_unlock(&fake_mutex);
    free(module);
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)name;
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function)
{
    *value = which == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? (int)((CUmodule)function)->local : 0;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{
    (void)device;
    *value = which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT             ? 8
             : which == CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR ? (int)THREADS / 8
                                                                           : 0;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    *value = limit == CU_LIMIT_STACK_SIZE ? stack_bytes : 0;
    return CUDA_SUCCESS;
}

/* Memory for the default stack size is part of the context, so only a larger stack size needs more memory. */
API CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    if (limit != CU_LIMIT_STACK_SIZE)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&fake_mutex);
    fake_uncount(fake_device(), (stack_bytes - 1024) * THREADS);
    stack_bytes = value < 1024 ? 1024 : value;
    fake_count(fake_device(), (stack_bytes - 1024) * THREADS);
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    (void)flags;
    NEED_CONTEXT
    *stream = (CUstream)malloc(1);
    pthread_mutex_lock(&fake_mutex);
    fake_count(fake_device(), STREAM_BYTES);
    pthread_mutex_unlock(&fake_mutex);
    return CUDA_SUCCESS;
}
