/* files.h: whole files in memory. */
#ifndef VGPU_RUNTIME_FILES_H
#define VGPU_RUNTIME_FILES_H

#include <stddef.h>

/*
 * Read everything from `fd` (or a file) into allocated memory with a zero byte at the end. Return NULL with errno on an
 * error; EFBIG if there is more than some 64 MiB, or no memory.
 */
char *vgpu_read_fd(int fd, size_t *length);
char *vgpu_read_file(const char *path, size_t *length);

/* Replaces a file atomically, keeping its mode and owner. Returns -1 with errno on an error. */
int vgpu_replace_file(const char *path, const char *bytes, size_t length);

#endif
