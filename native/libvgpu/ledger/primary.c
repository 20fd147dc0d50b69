#include "primary.h"

#include <pthread.h>
#include <stddef.h>

#include "in_child.h"

/* maximum of recorded green contexts; the charge for memory of a further one ends only when the memory is freed */
enum { NAMES_MAX = 256 };

static struct name {
    CUcontext context; /* NULL: the entry is free */
    CUcontext primary;
    int device;
} names[NAMES_MAX];
static unsigned used; /* entries from this index on were never used */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct name *find(CUcontext context)
{
    for (unsigned i = 0; i < used; i++)
        if (names[i].context == context)
            return &names[i];
    return NULL;
}

CUcontext vgpu_primary_of(CUcontext context)
{
    if (__atomic_load_n(&used, __ATOMIC_RELAXED) == 0 || context == NULL)
        return context;
    pthread_mutex_lock(&lock);
    const struct name *name = find(context);
    if (name != NULL)
        context = name->primary;
    pthread_mutex_unlock(&lock);
    return context;
}

void vgpu_primary_note(CUcontext context, CUcontext primary, int device)
{
    pthread_mutex_lock(&lock);
    struct name *name = find(context);
    if (name == NULL)
        name = find(NULL);
    if (name == NULL && used < NAMES_MAX) {
        name = &names[used];
        __atomic_store_n(&used, used + 1, __ATOMIC_RELAXED);
    }
    if (name != NULL)
        *name = (struct name){context, primary, device};
    pthread_mutex_unlock(&lock);
}

void vgpu_primary_forget(CUcontext context)
{
    pthread_mutex_lock(&lock);
    struct name *name = context == NULL ? NULL : find(context);
    if (name != NULL)
        name->context = NULL;
    pthread_mutex_unlock(&lock);
}

void vgpu_primary_ends(int device, void (*visit)(CUcontext context))
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used; i++)
        if (names[i].device == device && names[i].context != NULL)
            visit(names[i].context);
    pthread_mutex_unlock(&lock);
}

void vgpu_primary_ended(int device)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used; i++)
        if (names[i].device == device)
            names[i].context = NULL;
    pthread_mutex_unlock(&lock);
}

static void reset(void)
{
    pthread_mutex_init(&lock, NULL);
    used = 0;
}
VGPU_IN_CHILD(reset);
