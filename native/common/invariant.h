/*
 * invariant.h: checks invariants of the code itself in debug builds (VGPU_DEBUG, which a build with sanitizers or of
 * type Debug defines). A condition never depends on what a tenant can write: the `usage` page and messages are hostile
 * input, which release builds must refuse too. A condition has no side effects, because a release build does not
 * evaluate it.
 */
#ifndef VGPU_INVARIANT_H
#define VGPU_INVARIANT_H

#ifdef VGPU_DEBUG
#include <stdio.h>

/*
 * If the condition is false, writes it to standard error and ends the process by a trap (SIGILL on x86-64), with its
 * stack intact. Any thread may use it.
 */
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
