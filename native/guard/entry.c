/* Wraps the ways by which programs reach cuInit: direct linking, dlsym, and cuGetProcAddress (which cudart uses). */
#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

#include "dlsym_entry.h"
#include "guard.h"
#include "objects.h"

#define EXPORT __attribute__((visibility("default")))

typedef void *(*dlsym_fn)(void *handle, const char *name);
typedef int (*getproc_fn)(const char *symbol, void **pfn, int version, uint64_t flags);
typedef int (*getproc_v2_fn)(const char *symbol, void **pfn, int version, uint64_t flags, void *status);

EXPORT int cuInit(unsigned flags);
EXPORT int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, void *status);
struct vgpu_jump vgpu_guard_dlsym(void *handle, const char *name, const void *caller);

VGPU_DLSYM_ENTRY("vgpu_guard_dlsym");

enum { INIT, GETPROC, GETPROC_V2, HOOKS };
static const struct {
    const char *name;
    void *ours;
} hooks[HOOKS] = {
    {"cuInit", (void *)cuInit},
    {"cuGetProcAddress", (void *)cuGetProcAddress},
    {"cuGetProcAddress_v2", (void *)cuGetProcAddress_v2},
};
static void *g_real[HOOKS]; /* the functions that the hooks replace; atomic */
static void *g_next_dlsym;

struct search {
    const char *name;
    const void *from;
    bool past, nvidia_only;
    void *found;
};

struct origin {
    const void *address;
    bool driver;
};

static int visit_origin(struct dl_phdr_info *info, size_t size, void *argument)
{
    struct origin *origin = argument;
    bool holds = false;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        holds |= header->p_type == PT_LOAD && (uintptr_t)origin->address - start < header->p_memsz;
    }
    if (!holds)
        return 0;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *name = slash == NULL ? info->dlpi_name : slash + 1;
    origin->driver = strncmp(name, "libcuda.so", 10) == 0 || strcmp(name, "libvgpu.so") == 0;
    return 1;
}

/*
 * Is the address in the driver's library, or in libvgpu, which is called before the driver? dladdr is not used: old C
 * libraries in containers lack the version of it that is linked today, and the guard would not load there.
 */
static bool is_driver(const void *address)
{
    struct origin origin = {.address = address};
    dl_iterate_phdr(visit_origin, &origin);
    return origin.driver;
}

static int visit(const struct vgpu_object *object, void *argument)
{
    struct search *search = argument;
    if (!search->past) {
        search->past = vgpu_object_holds(object, search->from);
        return 0;
    }
    void *found = vgpu_object_symbol(object, search->name);
    if (found != NULL && (!search->nvidia_only || is_driver(found)))
        search->found = found;
    return search->found != NULL;
}

static void *next_definition(const char *name, const void *from, bool nvidia_only)
{
    struct search search = {.name = name, .from = from, .nvidia_only = nvidia_only};
    vgpu_objects_walk(visit, &search);
    return search.found;
}

static dlsym_fn next_dlsym(void)
{
    void *found = __atomic_load_n(&g_next_dlsym, __ATOMIC_ACQUIRE);
    if (found == NULL) {
        found = next_definition("dlsym", &g_next_dlsym, false);
        __atomic_store_n(&g_next_dlsym, found, __ATOMIC_RELEASE);
    }
    return (dlsym_fn)found;
}

static void *real(int id)
{
    void *found = __atomic_load_n(&g_real[id], __ATOMIC_ACQUIRE);
    if (found == NULL) {
        found = next_definition(hooks[id].name, &g_next_dlsym, true);
        __atomic_store_n(&g_real[id], found, __ATOMIC_RELEASE);
    }
    return found;
}

/* Returns the guard's function in place of the driver's. Any other function is returned unchanged. */
static void *replaced(int id, void *found)
{
    if (found == hooks[id].ours)
        return real(id) != NULL ? found : next_dlsym()(RTLD_NEXT, hooks[id].name);
    if (found == NULL || !is_driver(found))
        return found;
    __atomic_store_n(&g_real[id], found, __ATOMIC_RELEASE);
    return hooks[id].ours;
}

struct vgpu_jump vgpu_guard_dlsym(void *handle, const char *name, const void *caller)
{
    int id = HOOKS;
    for (int i = 0; name != NULL && i < HOOKS; i++)
        if (vgpu_same(name, hooks[i].name))
            id = i;
    if (id == HOOKS)
        return (struct vgpu_jump){.jump = (void *)next_dlsym()};
    void *found = handle == RTLD_NEXT ? next_definition(name, caller, false) : next_dlsym()(handle, name);
    if (found == NULL) /* the next dlsym fails for the caller itself, so that dlerror has the right text */
        return (struct vgpu_jump){.jump = (void *)next_dlsym()};
    return (struct vgpu_jump){.value = replaced(id, found)};
}

int cuInit(unsigned flags)
{
    guard_init_fn init = (guard_init_fn)real(INIT);
    return init == NULL ? GUARD_NO_DRIVER : guard_init(init, flags);
}

/* Replaces cuInit and cuGetProcAddress in an answer that the driver gave to the same arguments. */
static void map_answer(const char *symbol, void **pfn, int version)
{
    if (symbol == NULL || pfn == NULL || *pfn == NULL)
        return;
    if (strcmp(symbol, "cuInit") == 0) {
        if (*pfn != hooks[INIT].ours)
            __atomic_store_n(&g_real[INIT], *pfn, __ATOMIC_RELEASE);
        *pfn = hooks[INIT].ours;
    } else if (strcmp(symbol, "cuGetProcAddress") == 0 || strcmp(symbol, "cuGetProcAddress_v2") == 0) {
        /* from CUDA 12.0 on, a request for cuGetProcAddress means cuGetProcAddress_v2 (cudaTypedefs.h) */
        int id = *pfn == real(GETPROC) || (version < 12000 && *pfn != real(GETPROC_V2)) ? GETPROC : GETPROC_V2;
        *pfn = hooks[id].ours;
    }
}

int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags)
{
    getproc_fn ask = (getproc_fn)real(GETPROC);
    int code = ask == NULL ? GUARD_NO_DRIVER : ask(symbol, pfn, version, flags);
    if (code == GUARD_SUCCESS)
        map_answer(symbol, pfn, version);
    return code;
}

int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, void *status)
{
    getproc_v2_fn ask = (getproc_v2_fn)real(GETPROC_V2);
    int code = ask == NULL ? GUARD_NO_DRIVER : ask(symbol, pfn, version, flags, status);
    if (code == GUARD_SUCCESS)
        map_answer(symbol, pfn, version);
    return code;
}
