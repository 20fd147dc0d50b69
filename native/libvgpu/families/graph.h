/*
 * graph.h: memory that graphs allocate when they run. Per device the driver says how much it holds for
 * graphs, and that is the charge; the most that a graph can add is claimed before it is launched.
 *
 * Any thread may call these functions.
 */
#ifndef VGPU_GRAPH_H
#define VGPU_GRAPH_H

#include <stdbool.h>
#include <stdint.h>

#include "charge.h"

/* Does the stream record into a graph now? Costs one load until something was captured. */
bool vgpu_graph_captures(CUstream stream, int per_thread);

/*
 * Around the launch or upload of an executable graph. begin returns what to answer if not CUDA_SUCCESS:
 * CUDA_ERROR_OUT_OF_MEMORY over the limit. Both cost one load until a graph that allocates was made.
 */
CUresult vgpu_graph_begin(struct vgpu_charge *charge, CUgraphExec exec);
CUresult vgpu_graph_end(struct vgpu_charge *charge, CUgraphExec exec, CUresult result);

#endif
