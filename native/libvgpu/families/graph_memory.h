/*
 * graph_memory.h: memory that graphs allocate when they run. The driver reports for each device how much memory it
 * holds for graphs, and this is charged. What a launch can add is claimed before the launch.
 *
 * A launch adds nothing if its graph still has the memory of its last launch: since then no graph ran on another
 * stream, none kept its allocations beyond its launch, and nothing was trimmed. Any other launch adds at most what its
 * nodes take, and no more than is missing if all graphs had separate memory. It may take the memory of a launch that
 * claimed nothing and is in progress on another thread; then it claims the bytes of that launch too. If the claim exceeds
 * the limit, libvgpu first trims the memory that no graph uses now, and waits for the earlier work of the stream.
 *
 * Any thread may call these functions. Each, except vgpu_graph_trim, costs one load until a graph that allocates has
 * been made.
 */
#ifndef VGPU_GRAPH_MEMORY_H
#define VGPU_GRAPH_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "capture.h"
#include "charge.h"
#include "lease.h"

struct vgpu_graph_need; /* defined in graph_memory.c */

/* The claims of a launch: at most one for each device on which its graph allocates. */
struct vgpu_graph_charge {
    struct vgpu_graph_need *need; /* NULL: the graph's needs are not known */
    uint32_t devices;             /* devices on which the graph allocates, as bits; 0: nothing is claimed */
    CUstream stream;
    int per_thread;
    bool relies; /* the launch claims nothing, because its graph still has its memory */
    unsigned count;
    struct vgpu_charge of[VGPU_MAX_DEVICES];
};

/* Records that a graph may allocate from now on: executable graphs are examined when they are made. */
void vgpu_graph_memory_made(void);

/*
 * Returns whether the stream is being captured into a graph now, which may then allocate. Costs one load while there is
 * no capture.
 */
bool vgpu_graph_captures_now(CUstream stream, int per_thread);
static inline bool vgpu_graph_captures(CUstream stream, int per_thread)
{
    return vgpu_capture_any() && vgpu_graph_captures_now(stream, per_thread);
}

/*
 * vgpu_graph_instantiated: called after the driver has made an executable graph; returns `result`. vgpu_graph_forget:
 * called before the driver destroys one.
 */
CUresult vgpu_graph_instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph);
void vgpu_graph_forget(CUgraphExec exec);

/*
 * Called before and after the launch or upload of an executable graph. Precondition: no other thread destroys `exec`
 * before _end, as CUDA requires of a program. _begin returns CUDA_SUCCESS, and then _end must be called; or the error
 * for the program: CUDA_ERROR_OUT_OF_MEMORY above the limit.
 */
CUresult vgpu_graph_begin(struct vgpu_graph_charge *charge, CUgraphExec exec, CUstream stream, int per_thread);
CUresult vgpu_graph_end(struct vgpu_graph_charge *charge, CUresult result);

/* As vgpu_graph_begin, for an instantiation that uploads the graph at once and so allocates. */
CUresult vgpu_graph_begin_upload(struct vgpu_graph_charge *charge, CUgraph graph,
                                 const CUDA_GRAPH_INSTANTIATE_PARAMS *how);

/* Calls the driver's cuDeviceGraphMemTrim and updates the charge. */
CUresult vgpu_graph_trim(CUdevice device);

#endif
