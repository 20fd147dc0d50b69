#include "functions.h"

#include <dlfcn.h>
#include <string.h>

#include "dlsym.h"
#include "objects.h"

const struct vgpu_function vgpu_functions[VGPU_FUNCTIONS] = {
#define HOOK(symbol, library, family, since, what) {#symbol, (void *)&symbol, since, VGPU_##library},
#define USED(symbol, library) {#symbol, NULL, 0, VGPU_##library},
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

/* Keeps one reference: the pointers below stay good even if the process closes its own handle. */
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

void *vgpu_real_found(enum vgpu_function_id id)
{
    void *handle = library_handle(vgpu_functions[id].library, RTLD_NOLOAD);
    if (handle == NULL)
        return NULL;
    void *real = vgpu_libc_dlsym()(handle, vgpu_functions[id].name);
    if (real == vgpu_functions[id].wrapper) /* our own export is not the driver */
        return NULL;
    __atomic_store_n(&vgpu_reals[id], real, __ATOMIC_RELEASE);
    return real;
}

int vgpu_wrapped(const char *name)
{
    if ((name[0] != 'c' || name[1] != 'u') && (name[0] != 'n' || name[1] != 'v'))
        return -1; /* nearly every lookup of every program ends here */
    for (int id = 0; id < VGPU_FUNCTIONS; id++)
        if (vgpu_functions[id].wrapper != NULL && vgpu_same(vgpu_functions[id].name, name))
            return id;
    return -1;
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
