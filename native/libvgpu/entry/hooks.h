/*
 * hooks.h: the wrappers of libvgpu, by function.
 *
 * Constant tables: any thread, before main as well.
 */
#ifndef VGPU_HOOKS_H
#define VGPU_HOOKS_H

#include "functions.h"

struct vgpu_hook {
    void *wrapper; /* NULL: called, not wrapped */
    int since;     /* CUDA version that introduced this variant, as cuGetProcAddress counts */
};

extern const struct vgpu_hook vgpu_hooks[VGPU_FUNCTIONS]; /* by enum vgpu_function_id */

/* The id of a wrapped function by its symbol name, or -1. */
int vgpu_wrapped(const char *name);

#endif
