/*
 * hooks.c: the table of wrappers, and cuGetProcAddress, which returns wrappers. The driver is called first, with the
 * same arguments, so versions, flags and status are its own. Then the function in its answer is replaced by its
 * wrapper. The function is identified by its address, because a requested name has many variants; if the driver does
 * not export it, by the requested name, version and flags.
 */
#include "hooks.h"

#include <dlfcn.h>
#include <string.h>

#include "suspended.h"
#include "objects.h"

const struct vgpu_hook vgpu_hooks[VGPU_FUNCTIONS] = {
#define HOOK(symbol, library, family, since, what) {(void *)&symbol, since},
#define USED(symbol, library) {NULL, 0},
#define OPEN(symbol, family, reason)
#include "hooks.def"
#undef HOOK
#undef USED
#undef OPEN
};

int vgpu_wrapped(const char *name)
{
    if ((name[0] != 'c' || name[1] != 'u') && (name[0] != 'n' || name[1] != 'v'))
        return -1; /* a quick check: nearly every lookup of every program ends here */
    for (int id = 0; id < VGPU_FUNCTIONS; id++)
        if (vgpu_hooks[id].wrapper != NULL && vgpu_same(vgpu_functions[id].name, name))
            return id;
    return -1;
}

/* Returns whether `name` is a variant of `base`: the same name, or with _v2, _ptsz, _v2_ptds or similar added. */
static bool variant_of(const char *name, const char *base)
{
    size_t length = strlen(base);
    return strncmp(name, base, length) == 0 &&
           (name[length] == '\0' || strncmp(name + length, "_v", 2) == 0 || strncmp(name + length, "_pt", 3) == 0);
}

static void *wrapper_by_address(const char *symbol, const void *answer)
{
    for (int id = 0; id < VGPU_FUNCTIONS; id++) {
        const struct vgpu_function *function = &vgpu_functions[id];
        if (vgpu_hooks[id].wrapper != NULL && function->library == VGPU_CUDA && variant_of(function->name, symbol) &&
            vgpu_real((enum vgpu_function_id)id) == answer)
            return vgpu_hooks[id].wrapper;
    }
    return NULL;
}

static bool is_per_thread(int id)
{
    return strstr(vgpu_functions[id].name, "_pt") != NULL;
}

/*
 * Returns the wrapper for a function that the driver does not export, or NULL: the newest variant that is not newer
 * than the requested version, for the per-thread default stream if the flags request it and there is one.
 */
static void *wrapper_by_version(const char *symbol, int version, cuuint64_t flags)
{
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    int best = -1;
    for (int id = 0; id < VGPU_FUNCTIONS; id++) {
        if (vgpu_hooks[id].wrapper == NULL || vgpu_functions[id].library != VGPU_CUDA ||
            !variant_of(vgpu_functions[id].name, symbol) || vgpu_hooks[id].since > version ||
            (is_per_thread(id) && !per_thread))
            continue;
        bool closer = best < 0 || (is_per_thread(id) && !is_per_thread(best));
        if (closer || (is_per_thread(id) == is_per_thread(best) && vgpu_hooks[id].since > vgpu_hooks[best].since))
            best = id;
    }
    return best >= 0 ? vgpu_hooks[best].wrapper : NULL;
}

/* Returns the driver's function for the newest version that libvgpu knows, or NULL. */
static void *newest_known(const char *symbol, cuuint64_t flags)
{
    void *answer = NULL;
    CUresult result = REAL(cuGetProcAddress_v2) != NULL
                          ? CALL(cuGetProcAddress_v2, symbol, &answer, CUDA_VERSION, flags, NULL)
                          : CALL(cuGetProcAddress, symbol, &answer, CUDA_VERSION, flags);
    return result == CUDA_SUCCESS ? answer : NULL;
}

/*
 * Replaces the function in an answer by its wrapper. A variant newer than the header may take other arguments than any
 * wrapper, so it stays the driver's own, like an exported function that libvgpu does not know (unknown.h).
 */
static void *map_answer(const char *symbol, void *answer, int version, cuuint64_t flags)
{
    Dl_info about;
    void *wrapper = wrapper_by_address(symbol, answer);
    if (wrapper != NULL)
        return wrapper;
    if (dladdr(answer, &about) != 0 && about.dli_sname != NULL && about.dli_saddr == answer) {
        int id = vgpu_wrapped(about.dli_sname);
        return id >= 0 ? vgpu_hooks[id].wrapper : answer;
    }
    if (version > CUDA_VERSION && newest_known(symbol, flags) != answer)
        return answer;
    wrapper = wrapper_by_version(symbol, version, flags);
    return wrapper != NULL ? wrapper : answer;
}

VGPU_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuGetProcAddress, symbol, pfn, cudaVersion, flags);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = map_answer(symbol, *pfn, cudaVersion, flags);
    return result;
}

VGPU_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                         CUdriverProcAddressQueryResult *symbolStatus)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuGetProcAddress_v2, symbol, pfn, cudaVersion, flags, symbolStatus);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = map_answer(symbol, *pfn, cudaVersion, flags);
    return result;
}
