/* A node's description as flat text, one `key=value` a line: what vgpu-sim makes of a TOML profile. */
#ifndef VGPU_SIM_SPEC_H
#define VGPU_SIM_SPEC_H

#include <stdio.h>

#include "../state/state.h"

/* Fills *s; returns the number of the first bad line, 0 when all were good. */
unsigned sim_spec_read(struct sim_state *s, FILE *in);

#endif
