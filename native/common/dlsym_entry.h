/*
 * dlsym_entry.h: the entry of a dlsym that replaces the C library's, and forwards most lookups to it.
 *
 * VGPU_DLSYM_ENTRY(route) defines the exported dlsym. It calls route(handle, name, caller). Then it returns the value,
 * or *jumps* to the function that route returned, with the caller's arguments and return address in place: RTLD_NEXT
 * and dlerror then work as if the caller had called that function. Such a jump cannot be written in C.
 */
#ifndef VGPU_DLSYM_ENTRY_H
#define VGPU_DLSYM_ENTRY_H

/* The result of route: a value to return, or a function to jump to with the caller's arguments. */
struct vgpu_jump {
    void *value;
    void *jump;
};

#if defined(__x86_64__)
/* Registers: rdi and rsi have the arguments. A struct of two pointers is returned in rax:rdx. */
#define VGPU_DLSYM_ENTRY(route)                         \
    __asm__(".text\n"                                   \
            ".globl dlsym\n.type dlsym, @function\n"    \
            "dlsym:\n.cfi_startproc\n"                  \
            "endbr64\n"                                 \
            "push %rdi\n.cfi_adjust_cfa_offset 8\n"     \
            "push %rsi\n.cfi_adjust_cfa_offset 8\n"     \
            "mov 16(%rsp), %rdx\n"                      \
            "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\n"  \
            "call " route "\n"                          \
            "add $8, %rsp\n.cfi_adjust_cfa_offset -8\n" \
            "pop %rsi\n.cfi_adjust_cfa_offset -8\n"     \
            "pop %rdi\n.cfi_adjust_cfa_offset -8\n"     \
            "test %rdx, %rdx\n"                         \
            "jz 1f\n"                                   \
            "jmp *%rdx\n"                               \
            "1: ret\n"                                  \
            ".cfi_endproc\n.size dlsym, .-dlsym\n")
#elif defined(__aarch64__)
/* Registers: x0 and x1 have the arguments, x30 the return address. A struct of two pointers is returned in x0, x1. */
#define VGPU_DLSYM_ENTRY(route)                                                                  \
    __asm__(".text\n.globl dlsym\n.type dlsym, %function\ndlsym:\n.cfi_startproc\n"              \
            "hint #34\n"                                                                         \
            "stp x29, x30, [sp, #-32]!\n.cfi_def_cfa_offset 32\n"                                \
            ".cfi_offset 29, -32\n.cfi_offset 30, -24\n"                                         \
            "stp x0, x1, [sp, #16]\n"                                                            \
            "mov x2, x30\n"                                                                      \
            "bl " route "\n"                                                                     \
            "mov x17, x0\n"                                                                      \
            "mov x16, x1\n"                                                                      \
            "ldp x0, x1, [sp, #16]\n"                                                            \
            "ldp x29, x30, [sp], #32\n.cfi_def_cfa_offset 0\n.cfi_restore 29\n.cfi_restore 30\n" \
            "cbz x16, 1f\n"                                                                      \
            "br x16\n"                                                                           \
            "1: mov x0, x17\n"                                                                   \
            "ret\n"                                                                              \
            ".cfi_endproc\n.size dlsym, .-dlsym\n")
#else
#error "dlsym's entry is written for x86-64 and aarch64"
#endif

#endif
