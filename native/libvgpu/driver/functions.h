/*
 * functions.h: finds NVIDIA's functions at run time, in the library that the process has loaded. libvgpu links to
 * neither libcuda nor NVML. It does not load libcuda; it loads NVML only in a limited process that uses CUDA.
 *
 * Any thread may call these functions, at any time after libvgpu is loaded. A function that was found stays valid,
 * because libvgpu keeps the library loaded.
 */
#ifndef VGPU_FUNCTIONS_H
#define VGPU_FUNCTIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda_api.h"

enum vgpu_library { VGPU_CUDA, VGPU_NVML, VGPU_LIBRARIES };

enum vgpu_function_id {
#define HOOK(symbol, library, family, since, what) VGPU_FN_##symbol,
#define USED(symbol, library) VGPU_FN_##symbol,
#define OPEN(symbol, family, reason)
#include "hooks.def"
#undef HOOK
#undef USED
#undef OPEN
    VGPU_FUNCTIONS
};

struct vgpu_function {
    const char *name;
    enum vgpu_library library;
};

extern const struct vgpu_function vgpu_functions[VGPU_FUNCTIONS];

/* Returns NVIDIA's function, or NULL if its library is not loaded or lacks the function. */
void *vgpu_real_found(enum vgpu_function_id id);
extern void *vgpu_reals[VGPU_FUNCTIONS]; /* the functions found so far */
static inline void *vgpu_real(enum vgpu_function_id id)
{
    void *real = __atomic_load_n(&vgpu_reals[id], __ATOMIC_ACQUIRE);
    return __builtin_expect(real != NULL, 1) ? real : vgpu_real_found(id);
}

/*
 * Returns the definition of a symbol in the library or its dependencies, libvgpu excluded; NULL if the process has not
 * loaded the library.
 */
void *vgpu_library_symbol(enum vgpu_library library, const char *name);

/* Returns whether this address is inside NVIDIA's library (libcuda.so*, libnvidia-ml.so*). */
bool vgpu_is_nvidia(enum vgpu_library library, const void *address);

/* Loads the library if the process has not loaded it. Returns false if that fails. */
bool vgpu_library_load(enum vgpu_library library);

/* The driver's function with its C prototype. */
#define REAL(symbol) ((__typeof__(&symbol))vgpu_real(VGPU_FN_##symbol))

/* Calls the driver's function. If the driver lacks it, the result is CUDA_ERROR_NOT_SUPPORTED. */
#define CALL(symbol, ...)                                              \
    __extension__({                                                    \
        __typeof__(&symbol) real_ = REAL(symbol);                      \
        real_ != NULL ? real_(__VA_ARGS__) : CUDA_ERROR_NOT_SUPPORTED; \
    })

#define CALL_NVML(symbol, ...)                                              \
    __extension__({                                                         \
        __typeof__(&symbol) real_ = REAL(symbol);                           \
        real_ != NULL ? real_(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND; \
    })

#endif
