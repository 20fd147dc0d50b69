/* files.h: whole files in memory. */
#ifndef VGPU_RUNTIME_FILES_H
#define VGPU_RUNTIME_FILES_H

#include <stddef.h>

/*
 * Read everything from `fd` (or a file) into allocated memory with a zero byte at the end. Return NULL with errno on an
 * error.
 */
char *vgpu_read_fd(int fd, size_t *length);
char *vgpu_read_file(const char *path, size_t *length);

/* Replaces a file atomically, keeping its mode and owner. Returns -1 with errno on an error. */
int vgpu_replace_file(const char *path, const char *bytes, size_t length);

#endif
