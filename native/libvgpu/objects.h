/* objects.h: symbols of the objects in this process, read from their own dynamic tables. */
#ifndef VGPU_OBJECTS_H
#define VGPU_OBJECTS_H

#include <stdbool.h>

/* What `visit` is told about one loaded object, in load order. Non-zero ends the walk. */
struct vgpu_object;
typedef int (*vgpu_object_visit)(const struct vgpu_object *object, void *argument);
void vgpu_objects_walk(vgpu_object_visit visit, void *argument);

/* Does the object's code or data hold this address? */
bool vgpu_object_holds(const struct vgpu_object *object, const void *address);

/* The address of a symbol that the object itself defines, or NULL. */
void *vgpu_object_symbol(const struct vgpu_object *object, const char *name);

#endif
