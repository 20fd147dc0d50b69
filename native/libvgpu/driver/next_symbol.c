#include "next_symbol.h"

#include <stdbool.h>
#include <stddef.h>

#include "objects.h"

static void *libc_dlsym;
static void *libc_dlvsym;

struct next_search {
    const char *name;
    const void *from; /* an address in the object after which the search begins */
    bool past;
    void *found;
};

static int visit_next(const struct vgpu_object *object, void *argument)
{
    struct next_search *search = argument;
    if (search->past)
        search->found = vgpu_object_symbol(object, search->name);
    else
        search->past = vgpu_object_holds(object, search->from);
    return search->found != NULL;
}

void *vgpu_next_definition(const char *name, const void *from)
{
    struct next_search search = {.name = name, .from = from};
    vgpu_objects_walk(visit_next, &search);
    return search.found;
}

static void *next_of_ours(void **cache, const char *name)
{
    void *found = __atomic_load_n(cache, __ATOMIC_ACQUIRE);
    if (found == NULL) {
        found = vgpu_next_definition(name, cache);
        __atomic_store_n(cache, found, __ATOMIC_RELEASE);
    }
    return found;
}

vgpu_dlsym_fn vgpu_libc_dlsym(void)
{
    return (vgpu_dlsym_fn)next_of_ours(&libc_dlsym, "dlsym");
}

vgpu_dlvsym_fn vgpu_libc_dlvsym(void)
{
    return (vgpu_dlvsym_fn)next_of_ours(&libc_dlvsym, "dlvsym");
}
