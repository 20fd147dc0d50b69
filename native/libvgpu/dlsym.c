/*
 * dlsym.c: dlsym and dlvsym that hand out the wrappers.
 *
 * Every lookup of a name that is not in hooks.def *jumps* to the next dlsym with the caller's return
 * address in place, so RTLD_NEXT, RTLD_DEFAULT, scopes and dlerror mean what they mean without
 * libvgpu. That jump cannot be written in C; the two entry points are a few lines of assembly.
 *
 * The next dlsym is found by walking the dynamic symbol tables of the objects loaded after libvgpu
 * (dl_iterate_phdr): no GLIBC_PRIVATE symbol, no version number, and other interposers stay in line.
 *
 * For a wrapped name the answer is looked up first, and replaced only if it is NVIDIA's own function
 * (or libvgpu's export of it); a function of the same name from anywhere else is handed on untouched.
 * RTLD_NEXT then means the first object after the caller's own, in load order, that defines the name.
 */
#include "dlsym.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "objects.h"
#include "functions.h"

/* Either a value to return, or a function to jump to with the caller's arguments. */
struct vgpu_route {
    void *value;
    void *jump;
};

struct vgpu_route vgpu_dlsym_route(void *handle, const char *name, const void *caller);
struct vgpu_route vgpu_dlvsym_route(void *handle, const char *name, const char *version, const void *caller);

#if defined(__x86_64__)
/* rdi, rsi, rdx: arguments. A struct of two pointers comes back in rax:rdx. */
__asm__(".text\n"
        ".globl dlsym\n.type dlsym, @function\n"
        "dlsym:\n"
        ".cfi_startproc\n"
        "endbr64\n"
        "push %rdi\n.cfi_adjust_cfa_offset 8\n"
        "push %rsi\n.cfi_adjust_cfa_offset 8\n"
        "mov 16(%rsp), %rdx\n"
        "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\n"
        "call vgpu_dlsym_route\n"
        "add $8, %rsp\n.cfi_adjust_cfa_offset -8\n"
        "pop %rsi\n.cfi_adjust_cfa_offset -8\n"
        "pop %rdi\n.cfi_adjust_cfa_offset -8\n"
        "test %rdx, %rdx\n"
        "jz 1f\n"
        "jmp *%rdx\n"
        "1: ret\n"
        ".cfi_endproc\n.size dlsym, .-dlsym\n"
        ".globl dlvsym\n.type dlvsym, @function\n"
        "dlvsym:\n"
        ".cfi_startproc\n"
        "endbr64\n"
        "push %rdi\n.cfi_adjust_cfa_offset 8\n"
        "push %rsi\n.cfi_adjust_cfa_offset 8\n"
        "push %rdx\n.cfi_adjust_cfa_offset 8\n"
        "mov 24(%rsp), %rcx\n"
        "call vgpu_dlvsym_route\n"
        "mov %rdx, %rcx\n"
        "pop %rdx\n.cfi_adjust_cfa_offset -8\n"
        "pop %rsi\n.cfi_adjust_cfa_offset -8\n"
        "pop %rdi\n.cfi_adjust_cfa_offset -8\n"
        "test %rcx, %rcx\n"
        "jz 1f\n"
        "jmp *%rcx\n"
        "1: ret\n"
        ".cfi_endproc\n.size dlvsym, .-dlvsym\n");
#elif defined(__aarch64__)
/* x0-x2: arguments, x30: return address. A struct of two pointers comes back in x0, x1. */
#define ENTRY(name, route, caller_register)                                                      \
    __asm__(".text\n.globl " name "\n.type " name ", %function\n" name ":\n"                     \
            ".cfi_startproc\n"                                                                   \
            "hint #34\n"                                                                         \
            "stp x29, x30, [sp, #-48]!\n.cfi_def_cfa_offset 48\n"                                \
            ".cfi_offset 29, -48\n.cfi_offset 30, -40\n"                                         \
            "stp x0, x1, [sp, #16]\n"                                                            \
            "str x2, [sp, #32]\n"                                                                \
            "mov " caller_register ", x30\n"                                                     \
            "bl " route "\n"                                                                     \
            "mov x17, x0\n"                                                                      \
            "mov x16, x1\n"                                                                      \
            "ldp x0, x1, [sp, #16]\n"                                                            \
            "ldr x2, [sp, #32]\n"                                                                \
            "ldp x29, x30, [sp], #48\n.cfi_def_cfa_offset 0\n.cfi_restore 29\n.cfi_restore 30\n" \
            "cbz x16, 1f\n"                                                                      \
            "br x16\n"                                                                           \
            "1: mov x0, x17\n"                                                                   \
            "ret\n"                                                                              \
            ".cfi_endproc\n.size " name ", .-" name "\n")
ENTRY("dlsym", "vgpu_dlsym_route", "x2");
ENTRY("dlvsym", "vgpu_dlvsym_route", "x3");
#else
#error "dlsym's entry is written for x86-64 and aarch64"
#endif

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

/* The first definition of `name` in load order after the object that holds `from`. */
static void *next_definition(const char *name, const void *from)
{
    struct next_search search = {.name = name, .from = from};
    vgpu_objects_walk(visit_next, &search);
    return search.found;
}

static void *next_of_ours(void **cache, const char *name)
{
    void *found = __atomic_load_n(cache, __ATOMIC_ACQUIRE);
    if (found == NULL) {
        found = next_definition(name, cache);
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

/* What a lookup that found `found` shall return for the wrapped function `id`. */
static struct vgpu_route replace(int id, void *found)
{
    const struct vgpu_function *function = &vgpu_functions[id];
    struct vgpu_route route = {.value = found};
    if (found == NULL)
        return route;
    if (found == function->wrapper) {
        /* Our export stands in for the driver's function only where the driver has it; the second
         * lookup also leaves the dlerror that the process would see without us. */
        if (vgpu_real((enum vgpu_function_id)id) == NULL)
            route.value = vgpu_libc_dlsym()(RTLD_NEXT, function->name);
    } else if (vgpu_is_nvidia(function->library, found)) {
        route.value = function->wrapper;
    }
    return route;
}

struct vgpu_route vgpu_dlsym_route(void *handle, const char *name, const void *caller)
{
    int id = name != NULL ? vgpu_wrapped(name) : -1;
    if (id < 0)
        return (struct vgpu_route){.jump = (void *)vgpu_libc_dlsym()};
    if (handle != RTLD_NEXT)
        return replace(id, vgpu_libc_dlsym()(handle, name));
    void *found = next_definition(name, caller);
    if (found == NULL) /* jumps for the error text */
        return (struct vgpu_route){.jump = (void *)vgpu_libc_dlsym()};
    return replace(id, found);
}

struct vgpu_route vgpu_dlvsym_route(void *handle, const char *name, const char *version, const void *caller)
{
    int id = name != NULL ? vgpu_wrapped(name) : -1;
    (void)caller;
    if (id < 0 || handle == RTLD_NEXT) /* no released driver gives these names versions */
        return (struct vgpu_route){.jump = (void *)vgpu_libc_dlvsym()};
    return replace(id, vgpu_libc_dlvsym()(handle, name, version));
}
