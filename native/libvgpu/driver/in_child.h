/*
 * in_child.h: resets state in a forked child. A child has none of its parent's contexts, slot or threads, and a lock
 * may be held by a thread that does not exist in the child.
 */
#ifndef VGPU_IN_CHILD_H
#define VGPU_IN_CHILD_H

#if __has_attribute(retain)
#define VGPU_RETAINED __attribute__((used, retain))
#else
#define VGPU_RETAINED __attribute__((used))
#endif

/*
 * Registers `function`, which is called in a forked child. Such functions are called in no particular order, even if
 * their file was never used.
 */
#define VGPU_IN_CHILD(function) \
    VGPU_RETAINED __attribute__((section("vgpu_in_child"))) static void (*const function##_in_child)(void) = function

void vgpu_in_child(void);

#endif
