/*
 * next_symbol.h: finds the definition of a symbol that follows libvgpu in load order, such as the C library's dlsym,
 * dlvsym and ioctl, which libvgpu interposes. It walks the dynamic symbol tables of the loaded objects
 * (dl_iterate_phdr). This needs no GLIBC_PRIVATE symbol and no version number, and other interposers still work.
 *
 * Any thread may call these functions, before main too. Their results are valid for the life of the process.
 */
#ifndef VGPU_NEXT_SYMBOL_H
#define VGPU_NEXT_SYMBOL_H

typedef void *(*vgpu_dlsym_fn)(void *handle, const char *name);
typedef void *(*vgpu_dlvsym_fn)(void *handle, const char *name, const char *version);

/* Returns the first definition of `name` in load order after the object that contains `from`, or NULL. */
void *vgpu_next_definition(const char *name, const void *from);

/* Return the next dlsym or dlvsym in load order after libvgpu: another interposer's, or the C library's. */
vgpu_dlsym_fn vgpu_libc_dlsym(void);
vgpu_dlvsym_fn vgpu_libc_dlvsym(void);

#endif
