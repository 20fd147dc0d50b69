/*
 * thread.h: libvgpu's own threads in a program that knows nothing of them.
 *
 * Any thread may call these functions.
 */
#ifndef VGPU_THREAD_H
#define VGPU_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/*
 * Starts a thread with at least `stack_bytes` of stack beside the thread-local storage of the program's objects, which
 * the C library takes from the same room: a program with more of it than that has no thread otherwise. All signals are
 * blocked in it from its first instruction. `thread`: to be joined by the caller; NULL: nothing joins it. False: the
 * system has no thread or memory for it now.
 */
bool vgpu_thread_start(void *(*body)(void *), void *argument, size_t stack_bytes, pthread_t *thread);

/* As pthread_atfork(NULL, NULL, child), which in glibc is no function of the library's but one linked into each object,
 * of a name that other C libraries lack. False: the C library has neither. */
bool vgpu_thread_at_fork(void (*child)(void));

/* A section in which the calling thread is not cancelled: it holds locks that others need. The two calls are a pair,
 * and nest. */
int vgpu_thread_keep(void);
void vgpu_thread_release(int before);

#endif
