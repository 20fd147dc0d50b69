/* files.h: whole files in memory. */
#ifndef VGPU_RUNTIME_FILES_H
#define VGPU_RUNTIME_FILES_H

#include <stddef.h>

/* Everything read from `fd`, allocated, with a zero byte at the end; NULL with errno. */
char *vgpu_read_fd(int fd, size_t *length);
char *vgpu_read_file(const char *path, size_t *length);

/* Replaces a file atomically, keeping its mode and owner; -1 with errno. */
int vgpu_replace_file(const char *path, const char *bytes, size_t length);

#endif
