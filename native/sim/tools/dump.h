#ifndef VGPU_SIM_DUMP_H
#define VGPU_SIM_DUMP_H

#include "../state/state.h"

void sim_dump(struct sim_state *s); /* prints the state as JSON on standard output */

#endif
