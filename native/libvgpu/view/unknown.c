#include "unknown.h"

#include <stdlib.h>
#include <string.h>

#include "functions.h"
#include "objects.h"

/* The functions that libvgpu knows, sorted (hooks.py). */
static const char *const known[] = {
#define KNOWN(symbol) #symbol,
#include "known.def"
#undef KNOWN
};

struct unknown {
    uint32_t count;
    const char *first;
};

static int compare(const void *name, const void *place)
{
    return strcmp(name, *(const char *const *)place);
}

/*
 * Is this a function of the driver's API? Its name begins with cu and a capital letter; cudbg... belongs to a debugger.
 */
static bool is_driver_call(const char *name)
{
    return name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z';
}

static void note(const char *name, void *argument)
{
    struct unknown *found = argument;
    if (!is_driver_call(name) ||
        bsearch(name, known, sizeof(known) / sizeof(known[0]), sizeof(known[0]), compare) != NULL)
        return;
    if (found->first == NULL || strcmp(name, found->first) < 0)
        found->first = name;
    found->count++;
}

static int visit_driver(const struct vgpu_object *object, void *argument)
{
    if (!vgpu_object_holds(object, (const void *)REAL(cuInit)))
        return 0;
    vgpu_object_functions(object, note, argument);
    return 1;
}

void vgpu_unknown_tell(struct vgpu_usage *usage)
{
    struct unknown found = {0};
    if (REAL(cuInit) == NULL) /* looks up cuInit before the walk below, because the walk holds the loader's lock */
        return;
    vgpu_objects_walk(visit_driver, &found);
    if (found.count == 0)
        return;
    strncpy(usage->unknown_call, found.first, sizeof(usage->unknown_call) - 1);
    __atomic_store_n(&usage->unknown_calls, found.count, __ATOMIC_RELEASE);
}
