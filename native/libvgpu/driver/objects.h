/* objects.h: finds symbols of the objects in this process in their own dynamic tables. */
#ifndef VGPU_OBJECTS_H
#define VGPU_OBJECTS_H

#include <stdbool.h>

/*
 * The functions of this file call only dl_iterate_phdr. The same holds for libvgpu's dlsym if the name is not wrapped.
 * The reason: a sanitizer or an allocator calls dlsym while it starts, before its own strcmp or malloc works.
 */

/* Returns strcmp(a, b) == 0, without calling strcmp. */
static inline bool vgpu_same(const char *a, const char *b)
{
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* Called for each loaded object, in load order. A non-zero result ends the walk. */
struct vgpu_object;
typedef int (*vgpu_object_visit)(const struct vgpu_object *object, void *argument);
void vgpu_objects_walk(vgpu_object_visit visit, void *argument);

/* Returns whether the object's code or data contains this address. */
bool vgpu_object_holds(const struct vgpu_object *object, const void *address);

/* Returns the address of a symbol that the object itself defines, or NULL. */
void *vgpu_object_symbol(const struct vgpu_object *object, const char *name);

/* Calls `visit` with the name of each function that the object exports. */
void vgpu_object_functions(const struct vgpu_object *object, void (*visit)(const char *name, void *argument),
                           void *argument);

#endif
