/* context.h: contexts of this process. */
#ifndef VGPU_CONTEXT_H
#define VGPU_CONTEXT_H

/* In a forked child: it has none of its parent's contexts. */
void vgpu_context_reset(void);

#endif
