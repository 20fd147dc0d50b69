/*
 * moved.h: programs of a tenant that was moved have its former devices in CUDA_VISIBLE_DEVICES: what is
 * written into an environment stays there. The lease's file `moved` says which slice each of them is now.
 */
#ifndef VGPU_MOVED_H
#define VGPU_MOVED_H

/* Puts the devices of now into this process's CUDA_VISIBLE_DEVICES where it names former ones; before the
 * driver reads it. After vgpu_tenant_enter said limited. */
void vgpu_moved_follow(void);

#endif
