/* dlsym.h: the C library's dlsym and dlvsym, which libvgpu interposes. */
#ifndef VGPU_DLSYM_H
#define VGPU_DLSYM_H

typedef void *(*vgpu_dlsym_fn)(void *handle, const char *name);
typedef void *(*vgpu_dlvsym_fn)(void *handle, const char *name, const char *version);

/* The next dlsym in load order after libvgpu: another interposer's, or the C library's. */
vgpu_dlsym_fn vgpu_libc_dlsym(void);
vgpu_dlvsym_fn vgpu_libc_dlvsym(void);

#endif
