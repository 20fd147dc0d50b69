/*
 * hooks.h: libvgpu's wrappers, by function.
 *
 * The tables are constant: any thread may read them, before main too.
 */
#ifndef VGPU_HOOKS_H
#define VGPU_HOOKS_H

#include "functions.h"

struct vgpu_hook {
    void *wrapper; /* NULL: the function is called by libvgpu, but not wrapped */
    int since;     /* CUDA version that introduced this variant, as a number of cuGetProcAddress */
};

extern const struct vgpu_hook vgpu_hooks[VGPU_FUNCTIONS]; /* the hooks, by enum vgpu_function_id */

/* Returns the id of a wrapped function by its symbol name, or -1. */
int vgpu_wrapped(const char *name);

#endif
