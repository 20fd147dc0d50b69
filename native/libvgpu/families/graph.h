/*
 * graph.h: memory that graphs allocate when they run. For each device the driver reports the memory that it holds for
 * graphs, which is charged; the most that a graph can add is claimed before its launch.
 *
 * Any thread may call these functions.
 */
#ifndef VGPU_GRAPH_H
#define VGPU_GRAPH_H

#include <stdbool.h>
#include <stdint.h>

#include "charge.h"
#include "lease.h"

struct vgpu_graph_need; /* graph.c */

/* The claims of a launch, one for each device that its graph allocates on. */
struct vgpu_graph_charge {
    struct vgpu_graph_need *need; /* NULL: none */
    unsigned count;
    struct vgpu_charge of[VGPU_MAX_DEVICES];
};

/* Is the stream being captured into a graph now? Costs one load until a capture was begun. */
bool vgpu_graph_captures(CUstream stream, int per_thread);

/*
 * Around the launch or upload of an executable graph. Precondition: no other thread destroys `exec` before end, as CUDA
 * requires of a program. begin returns CUDA_SUCCESS or the error for the program: CUDA_ERROR_OUT_OF_MEMORY over the
 * limit. Both cost one load until a graph that allocates was made.
 */
CUresult vgpu_graph_begin(struct vgpu_graph_charge *charge, CUgraphExec exec);
CUresult vgpu_graph_end(struct vgpu_graph_charge *charge, CUresult result);

#endif
