/* view.h: what the tenant is told about its memory. */
#ifndef VGPU_VIEW_H
#define VGPU_VIEW_H

/* In a forked child: a thread that is not here may have held the lock. */
void vgpu_view_reset(void);

#endif
