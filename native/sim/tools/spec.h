/*
 * Reads a node's description as flat text, with one `key=value` a line; vgpu-sim makes that text from a TOML profile.
 */
#ifndef VGPU_SIM_SPEC_H
#define VGPU_SIM_SPEC_H

#include <stdio.h>

#include "../state/state.h"

/* Reads the description into *s. Returns the number of the first bad line, or 0 if all lines are good. */
unsigned sim_spec_read(struct sim_state *s, FILE *in);

#endif
