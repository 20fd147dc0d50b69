/* module.h: the cache of measured functions. */
#ifndef VGPU_MODULE_H
#define VGPU_MODULE_H

/* Empties the cache. To be called after handles of functions have become invalid, because the driver gives them to
 * other functions. A lookup that races with the end of a module may go unmeasured until the next measurement. */
void vgpu_module_forget(void);

#endif
