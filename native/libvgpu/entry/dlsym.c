/*
 * dlsym.c: defines dlsym and dlvsym, which return libvgpu's wrappers.
 *
 * A lookup of a name that libvgpu does not wrap (hooks.toml) *jumps* to the next dlsym with the caller's return address
 * in place, so RTLD_NEXT, RTLD_DEFAULT, scopes and dlerror work as without libvgpu. That jump cannot be written in C,
 * so the two entry points are a few lines of assembly.
 *
 * For a wrapped name the next dlsym looks it up first. The result is replaced only if it is NVIDIA's own function (or
 * libvgpu's export of it); a function of the same name in another object is returned unchanged. RTLD_NEXT then means
 * the first object after the caller's own, in load order, that defines the name.
 */
#include <dlfcn.h>
#include <stddef.h>

#include "hooks.h"
#include "next_symbol.h"

/* What to do with a lookup: return a value, or jump to a function with the caller's arguments. */
struct vgpu_route {
    void *value;
    void *jump;
};

struct vgpu_route vgpu_dlsym_route(void *handle, const char *name, const void *caller);
struct vgpu_route vgpu_dlvsym_route(void *handle, const char *name, const char *version, const void *caller);

#if defined(__x86_64__)
/* Registers: rdi, rsi and rdx have the arguments. A struct of two pointers is returned in rax:rdx. */
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
/* Registers: x0 to x2 have the arguments, x30 the return address. A struct of two pointers is returned in x0, x1. */
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

/* Returns the result for a lookup of the wrapped function `id`, for which the next dlsym found `found`. */
static struct vgpu_route replace(int id, void *found)
{
    const struct vgpu_hook *hook = &vgpu_hooks[id];
    struct vgpu_route route = {.value = found};
    if (found == NULL)
        return route;
    if (found == hook->wrapper) {
        /*
         * libvgpu's export replaces the driver's function only if the driver has it; the second lookup also sets
         * dlerror as without libvgpu.
         */
        if (vgpu_real((enum vgpu_function_id)id) == NULL)
            route.value = vgpu_libc_dlsym()(RTLD_NEXT, vgpu_functions[id].name);
    } else if (vgpu_is_nvidia(vgpu_functions[id].library, found)) {
        route.value = hook->wrapper;
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
    void *found = vgpu_next_definition(name, caller);
    if (found == NULL) /* jumps to dlsym for the same lookup, so that dlerror has the text for this caller */
        return (struct vgpu_route){.jump = (void *)vgpu_libc_dlsym()};
    return replace(id, found);
}

struct vgpu_route vgpu_dlvsym_route(void *handle, const char *name, const char *version, const void *caller)
{
    int id = name != NULL ? vgpu_wrapped(name) : -1;
    (void)caller;
    /* a lookup with RTLD_NEXT is passed on unchanged: no released driver gives its functions versions */
    if (id < 0 || handle == RTLD_NEXT)
        return (struct vgpu_route){.jump = (void *)vgpu_libc_dlvsym()};
    return replace(id, vgpu_libc_dlvsym()(handle, name, version));
}
