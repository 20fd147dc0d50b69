#include "in_child.h"

typedef void (*reset_fn)(void);

/* The linker's symbols for the beginning and the end of section vgpu_in_child. */
extern const reset_fn __start_vgpu_in_child[] __attribute__((visibility("hidden")));
extern const reset_fn __stop_vgpu_in_child[] __attribute__((visibility("hidden")));

void vgpu_in_child(void)
{
    for (const reset_fn *reset = __start_vgpu_in_child; reset < __stop_vgpu_in_child; reset++)
        (*reset)();
}
