/* files.h: whole files in memory. */
#ifndef VGPU_RUNTIME_FILES_H
#define VGPU_RUNTIME_FILES_H

#include <stddef.h>

/* All that can be read from `fd`, allocated, with a zero byte behind it; NULL with errno. */
char *vgpu_read_fd(int fd, size_t *length);
char *vgpu_read_file(const char *path, size_t *length);

/* Replaces a file in one step, with the mode and the owner that it had; -1 with errno. */
int vgpu_replace_file(const char *path, const char *bytes, size_t length);

#endif
