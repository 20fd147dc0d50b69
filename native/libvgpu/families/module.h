/* module.h: what is remembered of functions that the program looked up. */
#ifndef VGPU_MODULE_H
#define VGPU_MODULE_H

/* Each function is new again. To be called where handles of functions end: the driver gives them to others. */
void vgpu_module_forget(void);

#endif
