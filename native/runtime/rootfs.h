/* Changes to the root file system of a container, made before the container's own programs run. */
#ifndef VGPU_RUNTIME_ROOTFS_H
#define VGPU_RUNTIME_ROOTFS_H

/*
 * Both functions run in the container's mount namespace, in an OCI createContainer hook, before the container's root
 * becomes "/". `root` is the path of the image's root; the functions follow none of the symbolic links in it. They
 * return -1 with errno on failure.
 */

/* Puts `library` first, and then the entries of the image's own /etc/ld.so.preload. */
int vgpu_preload(const char *root, const char *library);

/*
 * Mounts the files of `folder`, a path in the container that has the driver's libraries, into the folder that the
 * image's C library searches by default, if that is a different folder.
 */
int vgpu_libraries(const char *root, const char *folder);

#endif
