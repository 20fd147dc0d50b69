/*
 * invariant.h: conditions that the code relies on and keeps by itself, checked in debug builds (VGPU_DEBUG, which a build
 * with sanitizers or of type Debug defines). A condition is never about what a tenant can write: the `usage` page and messages
 * are hostile input, which release builds have to refuse as well. It has no side effects: a release build does not evaluate it.
 */
#ifndef VGPU_INVARIANT_H
#define VGPU_INVARIANT_H

#ifdef VGPU_DEBUG
#include <stdio.h>

/* Writes the condition to standard error and ends the process by SIGILL, with its stack as it is. Any thread. */
#define VGPU_ASSERT(condition)                                                                      \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, __func__, #condition); \
            __builtin_trap();                                                                       \
        }                                                                                           \
    } while (0)
#else
#define VGPU_ASSERT(condition) ((void)sizeof(!(condition)))
#endif

#endif
