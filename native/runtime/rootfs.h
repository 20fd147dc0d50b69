/* rootfs.h: what is put into a container's root before its own programs run. */
#ifndef VGPU_RUNTIME_ROOTFS_H
#define VGPU_RUNTIME_ROOTFS_H

/* Both are called in the container's mount namespace, before its root becomes "/" (an OCI createContainer
 * hook). `root` is the image's: none of its symbolic links are followed. -1 with errno. */

/* `library` first, then what the image's own /etc/ld.so.preload names. */
int vgpu_preload(const char *root, const char *library);

/* Files of `folder` (a path of the container, with the driver's libraries in it) into the folder where the
 * image's C library looks for libraries without being told, where that is another one. */
int vgpu_libraries(const char *root, const char *folder);

#endif
