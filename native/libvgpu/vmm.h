/* vmm.h: physical allocations of this process. */
#ifndef VGPU_VMM_H
#define VGPU_VMM_H

/* In a forked child: a thread that is not here may have held the lock. */
void vgpu_vmm_reset(void);

#endif
