/*
 * graph_memory.h: memory that graphs allocate when they run. For each device the driver reports the memory that it
 * holds for graphs, which is charged; what a launch can add to it is claimed before the launch.
 *
 * A launch adds nothing if its graph still has the memory of its last launch: no graph ran on another stream since,
 * none kept its allocations beyond its launch, and nothing was trimmed. Any other launch adds at most what its nodes
 * take, and no more than is missing to the memory of all graphs side by side. Where that does not fit within the limit,
 * memory that no graph uses now is trimmed first.
 *
 * Any thread may call these functions. All of them cost one load until a graph that allocates was made.
 */
#ifndef VGPU_GRAPH_MEMORY_H
#define VGPU_GRAPH_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "charge.h"
#include "lease.h"

struct vgpu_graph_need; /* graph_memory.c */

/* The claims of a launch, at most one for each device that its graph allocates on. */
struct vgpu_graph_charge {
    struct vgpu_graph_need *need; /* NULL: none is known */
    uint32_t devices;             /* on which the graph allocates, as bits; 0: nothing is claimed */
    unsigned count;
    struct vgpu_charge of[VGPU_MAX_DEVICES];
};

/* A graph may allocate from now on: executable graphs are looked at when they are made. */
void vgpu_graph_memory_made(void);

/* Is the stream being captured into a graph now? Costs one load until a capture was begun. */
bool vgpu_graph_captures(CUstream stream, int per_thread);

/* After the driver made an executable graph, and before it destroys one. Returns `result`. */
CUresult vgpu_graph_instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph);
void vgpu_graph_forget(CUgraphExec exec);

/*
 * Around the launch or upload of an executable graph. Precondition: no other thread destroys `exec` before end, as CUDA
 * requires of a program. begin returns CUDA_SUCCESS, and then end must be called; or the error for the program:
 * CUDA_ERROR_OUT_OF_MEMORY over the limit.
 */
CUresult vgpu_graph_begin(struct vgpu_graph_charge *charge, CUgraphExec exec, CUstream stream, int per_thread);
CUresult vgpu_graph_end(struct vgpu_graph_charge *charge, CUresult result);

/* As begin, for an instantiation that uploads the graph, and so allocates, at once. */
CUresult vgpu_graph_begin_upload(struct vgpu_graph_charge *charge, CUgraph graph,
                                 const CUDA_GRAPH_INSTANTIATE_PARAMS *how);

/* The driver's cuDeviceGraphMemTrim. */
CUresult vgpu_graph_trim(CUdevice device);

#endif
