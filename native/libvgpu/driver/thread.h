/*
 * thread.h: starts libvgpu's own threads, which the program does not expect.
 *
 * Any thread may call these functions.
 */
#ifndef VGPU_THREAD_H
#define VGPU_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/*
 * Starts a thread with at least `stack_bytes` of stack in addition to the program's thread-local storage, which the C
 * library takes from the stack. All signals are blocked in it from its first instruction. If `thread` is not NULL, the
 * caller joins it; otherwise it is detached. Returns false if the system has no thread or memory for it now.
 */
bool vgpu_thread_start(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread);

/*
 * As pthread_atfork(NULL, NULL, child). glibc's pthread_atfork is linked statically and calls __register_atfork, which
 * other C libraries lack. This function looks up both names at run time. Returns false if the process has neither.
 */
bool vgpu_thread_at_fork(void (*child)(void));

/*
 * Begin and end a section in which the calling thread cannot be cancelled, because it holds locks that others need. The
 * two calls are a pair, and nest.
 */
int vgpu_thread_keep(void);
void vgpu_thread_release(int before);

#endif
