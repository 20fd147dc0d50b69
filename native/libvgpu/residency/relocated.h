/*
 * relocated.h: a tenant that was moved to other devices has programs whose CUDA_VISIBLE_DEVICES names the former ones.
 * The lease's file VGPU_MOVED_FILE says which slice each former device is now.
 */
#ifndef VGPU_RELOCATED_H
#define VGPU_RELOCATED_H

/* Replaces former devices in this process's CUDA_VISIBLE_DEVICES by the present ones. Preconditions:
 * vgpu_tenant_enter said limited, and the driver has not read the variable yet. */
void vgpu_relocated_follow(void);

#endif
