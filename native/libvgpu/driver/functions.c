#include "functions.h"

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "next_symbol.h"

const struct vgpu_function vgpu_functions[VGPU_FUNCTIONS] = {
#define HOOK(symbol, library, family, since, what) {#symbol, VGPU_##library},
#define USED(symbol, library) {#symbol, VGPU_##library},
#define OPEN(symbol, family, reason)
#include "hooks.def"
#undef HOOK
#undef USED
#undef OPEN
};

static const char *const sonames[VGPU_LIBRARIES] = {"libcuda.so.1", "libnvidia-ml.so.1"};
static const char *const stems[VGPU_LIBRARIES] = {"libcuda.so", "libnvidia-ml.so"};

static void *handles[VGPU_LIBRARIES];
void *vgpu_reals[VGPU_FUNCTIONS];

/*
 * Opens the library once and keeps the reference, so that the addresses in vgpu_reals stay valid even if the process
 * closes its own handle.
 */
static void *library_handle(enum vgpu_library library, int flags)
{
    void *handle = __atomic_load_n(&handles[library], __ATOMIC_ACQUIRE);
    if (handle == NULL) {
        handle = dlopen(sonames[library], RTLD_LAZY | flags);
        if (handle != NULL)
            __atomic_store_n(&handles[library], handle, __ATOMIC_RELEASE);
    }
    return handle;
}

bool vgpu_library_load(enum vgpu_library library)
{
    return library_handle(library, RTLD_LOCAL) != NULL;
}

void *vgpu_library_symbol(enum vgpu_library library, const char *name)
{
    void *handle = library_handle(library, RTLD_NOLOAD);
    return handle != NULL ? vgpu_libc_dlsym()(handle, name) : NULL;
}

/* The linker's symbols for the beginning and the end of libvgpu itself. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static bool is_own(const void *address)
{
    return (uintptr_t)address - (uintptr_t)__ehdr_start < (uintptr_t)_end - (uintptr_t)__ehdr_start;
}

void *vgpu_real_found(enum vgpu_function_id id)
{
    void *handle = library_handle(vgpu_functions[id].library, RTLD_NOLOAD);
    if (handle == NULL)
        return NULL;
    void *real = vgpu_libc_dlsym()(handle, vgpu_functions[id].name);
    if (is_own(real)) /* the address found is libvgpu's own export, not the driver's function */
        return NULL;
    __atomic_store_n(&vgpu_reals[id], real, __ATOMIC_RELEASE);
    return real;
}

bool vgpu_is_nvidia(enum vgpu_library library, const void *address)
{
    Dl_info about;
    if (dladdr(address, &about) == 0 || about.dli_fname == NULL)
        return false;
    const char *slash = strrchr(about.dli_fname, '/');
    const char *base = slash != NULL ? slash + 1 : about.dli_fname;
    return strncmp(base, stems[library], strlen(stems[library])) == 0;
}
