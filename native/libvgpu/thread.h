/* thread.h: threads of libvgpu's own in somebody else's program. */
#ifndef VGPU_THREAD_H
#define VGPU_THREAD_H

#include <stdbool.h>
#include <stddef.h>

/* Starts one that nobody joins. It takes no signal of the program's: all are blocked in it from its first
 * instruction. False: there is none. */
bool vgpu_thread_start(void *(*body)(void *), size_t stack_bytes);

#endif
