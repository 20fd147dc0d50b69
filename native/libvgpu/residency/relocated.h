/*
 * relocated.h: after a move to other devices, programs of the tenant have a CUDA_VISIBLE_DEVICES that names the earlier
 * devices. The lease's file VGPU_MOVED_FILE says to which slice each earlier device belongs now.
 */
#ifndef VGPU_RELOCATED_H
#define VGPU_RELOCATED_H

/*
 * Replaces earlier devices in this process's CUDA_VISIBLE_DEVICES by the present ones. Preconditions: vgpu_tenant_enter
 * has set *limited to true, and the driver has not read the variable yet.
 */
void vgpu_relocated_follow(void);

#endif
