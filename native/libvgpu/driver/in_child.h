/*
 * in_child.h: what a forked child resets. It has none of its parent's contexts, slot or threads, and a lock may be held
 * by a thread that is not there any more.
 */
#ifndef VGPU_IN_CHILD_H
#define VGPU_IN_CHILD_H

#if __has_attribute(retain)
#define VGPU_RETAINED __attribute__((used, retain))
#else
#define VGPU_RETAINED __attribute__((used))
#endif

/* `function` is called in the child: in no order, each whether its file was used or not. */
#define VGPU_IN_CHILD(function) \
    VGPU_RETAINED __attribute__((section("vgpu_in_child"))) static void (*const function##_in_child)(void) = function

void vgpu_in_child(void);

#endif
