/* CUDA graphs: nodes and edges, instantiated graphs, and the capture of streams into graphs. */
#ifndef VGPU_SIM_CUDA_GRAPH_H
#define VGPU_SIM_CUDA_GRAPH_H

#include "internal.h"

/*
 * Memory of an allocation node. Its addresses are fixed when the node is made; a launch takes its pages and a free
 * gives them back. The node, the node's clones and the live block hold references to it.
 */
struct cu_graph_memory {
    uint32_t refs;
    bool live;
    CUdeviceptr address;
    size_t size;
    CUcontext ctx;
};

struct CUgraphNode_st {
    uint32_t magic;
    CUgraphNodeType type;
    CUgraph graph;
    CUgraphNode origin; /* the node of which this node is a clone */
    unsigned int id;
    bool disabled, ordered;
    CUgraphNode *before; /* nodes that must run before this node */
    size_t before_count;
    CUgraphNode next;
    union {
        CUDA_KERNEL_NODE_PARAMS kernel;
        struct {
            CUDA_MEMCPY3D shape;
            CUcontext ctx;
        } copy;
        struct {
            CUDA_MEMSET_NODE_PARAMS shape;
            CUcontext ctx;
        } set;
        CUDA_HOST_NODE_PARAMS host;
        CUgraph child; /* child graph, owned by this node */
        CUevent event;
        struct {
            CUDA_MEM_ALLOC_NODE_PARAMS shape;
            struct cu_graph_memory *memory;
        } alloc;
        CUdeviceptr free;
    };
};

struct cu_kept_object {
    CUuserObject object;
    unsigned int count;
    struct cu_kept_object *next;
};

struct CUgraph_st {
    uint32_t magic;
    unsigned int id, next_node;
    CUgraph origin;
    CUgraphNode parent; /* in a child graph: the node that owns the graph */
    CUgraphNode first, last;
    size_t node_count;
    CUgraphNode *order; /* in an instantiated graph: the order in which its nodes run */
    bool has_memory;    /* the graph, or a child of it, has allocation or free nodes */
    CUgraphExec execs;  /* list of the live instantiations of this graph */
    struct cu_kept_object *objects;
};

struct CUgraphExec_st {
    uint32_t magic;
    struct cu_owner owner; /* the context that was current at the instantiation; ctx NULL: none was */
    CUgraph graph;         /* a clone of the source, owned by this object */
    CUgraph source;        /* the graph that was instantiated; NULL after it was destroyed */
    cuuint64_t flags;
    CUgraphExec next; /* list of the instantiations of the same source */
};

static inline bool cu_is_graph(CUgraph graph)
{
    return graph != NULL && graph->magic == CU_GRAPH;
}

static inline bool cu_is_node(CUgraphNode node)
{
    return node != NULL && node->magic == CU_NODE;
}

/* Functions of graph.c. The caller holds cu_lock. */
CUgraph cu_graph_new(void);
void cu_graph_free(CUgraph graph);
CUresult cu_graph_clone(CUgraph from, bool with_memory, CUgraph *out);
CUresult cu_graph_add(CUgraph graph, CUgraphNodeType type, const CUgraphNode *before, size_t count, CUgraphNode *out);
void cu_graph_drop_last(CUgraph graph, CUgraphNode node); /* undoes the last cu_graph_add */
CUgraphNode cu_graph_find_clone(CUgraph graph, CUgraphNode original);
/* fills `order` of the graph and of its children; returns INVALID_VALUE if the edges form a cycle */
CUresult cu_graph_order(CUgraph graph);
CUresult cu_list_nodes(CUgraphNode *out, size_t *count, CUgraphNode *all, size_t n);

/* Functions of graph_backing.c. The caller holds cu_lock. */
CUresult cu_graph_memory_new(CUcontext ctx, size_t size, struct cu_graph_memory **out);
void cu_graph_memory_release(struct cu_graph_memory *m);
CUresult cu_graph_memory_take(struct cu_graph_memory *m); /* a launch calls this */
bool cu_graph_memory_owns(CUdeviceptr p);                 /* returns true if p is an address of an allocation node */
/* Functions of graph_memory.c. The caller holds cu_lock. */
CUresult cu_graph_add_alloc(CUgraph graph, const CUgraphNode *before, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params,
                            CUgraphNode *out);
CUresult cu_graph_add_free(CUgraph graph, const CUgraphNode *before, size_t count, CUdeviceptr p, CUgraphNode *out);

/* Functions of graph_exec.c. */
CUresult cu_check_exec(CUgraphExec exec); /* succeeds if exec is a live instantiation with a live context */
CUresult cu_graph_instantiate(CUgraph graph, cuuint64_t flags, CUgraphExec *out);
CUresult cu_graph_launch(CUgraphExec exec, CUstream stream);

/* Functions of user_object.c. The caller holds cu_lock, except for cu_objects_run. */
void cu_object_drop(CUuserObject object, unsigned int count);
void cu_object_keep(CUuserObject object, unsigned int count);
/* runs the destructors of objects whose last reference was dropped; the caller does not hold cu_lock */
void cu_objects_run(void);

/* Functions of capture.c: the capture of streams. */
struct cu_capture {
    CUgraph graph;
    bool own_graph, invalid;
    CUstreamCaptureMode mode;
    unsigned long long id;
    CUstream origin;
    pthread_t thread;
    CUstream *streams;
    size_t stream_count;
    struct cu_capture *next;
};

extern struct cu_capture *cu_captures_list; /* guarded by cu_lock */
CUresult cu_capture_begin(CUstream stream, CUgraph graph, const CUgraphNode *before, size_t count,
                          CUstreamCaptureMode mode);
CUresult cu_capture_end(CUstream stream, CUgraph *graph);
CUresult cu_capture_set(CUstream state, const CUgraphNode *nodes, size_t count, bool add);
/* Adds a node after the nodes that the stream has captured; the caller fills the node in. */
CUresult cu_capture_add(CUstream stream, CUgraphNodeType type, CUgraphNode *out);
void cu_capture_list(CUstream stream, const CUgraphNode **nodes, size_t *count);
/* sets the node after which the stream's next node comes */
void cu_capture_frontier(CUstream stream, CUgraphNode node);

#endif
