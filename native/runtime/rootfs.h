/* rootfs.h: changes in a container's root before its own programs run. */
#ifndef VGPU_RUNTIME_ROOTFS_H
#define VGPU_RUNTIME_ROOTFS_H

/* Both are called in the container's mount namespace, before its root becomes "/" (an OCI createContainer
 * hook). `root` is the image's: none of its symbolic links are followed. -1 with errno. */

/* Puts `library` first, and then the entries of the image's own /etc/ld.so.preload. */
int vgpu_preload(const char *root, const char *library);

/*
 * Mounts the files of `folder` (a path in the container with the driver's libraries) into the folder where the image's
 * C library searches by default, if that is another one.
 */
int vgpu_libraries(const char *root, const char *folder);

#endif
