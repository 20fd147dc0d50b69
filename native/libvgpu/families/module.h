/* module.h: the cache of measured functions. */
#ifndef VGPU_MODULE_H
#define VGPU_MODULE_H

/*
 * Empties the cache. Call it after handles of functions have become invalid, because the driver reuses handles. A
 * lookup that races with the end of a module may stay unmeasured until the next measurement.
 */
void vgpu_module_forget(void);

#endif
