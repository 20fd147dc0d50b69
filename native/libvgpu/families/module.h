/* module.h: the cache of functions whose memory was measured. */
#ifndef VGPU_MODULE_H
#define VGPU_MODULE_H

/*
 * Empties the cache. Must be called after handles of functions have become invalid, because the driver reuses handles.
 * A lookup that races with the end of a module may stay unmeasured until the next measurement.
 */
void vgpu_module_forget(void);

#endif
