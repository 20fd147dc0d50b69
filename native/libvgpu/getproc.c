/*
 * getproc.c: cuGetProcAddress. The driver is asked first, with the same arguments, so versions,
 * flags and status are its own; then the function it returned is mapped to the wrapper of that very
 * function, told by its address, never by the name that was asked for (which stands for many variants).
 */
#include <dlfcn.h>
#include <string.h>

#include "away.h"
#include "functions.h"

/* Is `name` a variant of `base`: itself, or itself with _v2, _ptsz, _v2_ptds, ...? */
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
        if (function->wrapper != NULL && function->library == VGPU_CUDA && variant_of(function->name, symbol) &&
            vgpu_real((enum vgpu_function_id)id) == answer)
            return function->wrapper;
    }
    return NULL;
}

static bool is_per_thread(const struct vgpu_function *function)
{
    return strstr(function->name, "_pt") != NULL;
}

/* A driver may answer with an entry that is not the exported one; then its own name for it decides, and
 * last the variant that the asked version and stream flag stand for. */
static void *wrapper_by_version(const char *symbol, int version, cuuint64_t flags)
{
    bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const struct vgpu_function *best = NULL;
    for (int id = 0; id < VGPU_FUNCTIONS; id++) {
        const struct vgpu_function *function = &vgpu_functions[id];
        if (function->wrapper == NULL || function->library != VGPU_CUDA || !variant_of(function->name, symbol) ||
            function->since > version || (is_per_thread(function) && !per_thread))
            continue;
        bool closer = best == NULL || (is_per_thread(function) && !is_per_thread(best));
        if (closer || (is_per_thread(function) == is_per_thread(best) && function->since > best->since))
            best = function;
    }
    return best != NULL ? best->wrapper : NULL;
}

/* What the driver answers for the newest version that libvgpu knows, or NULL. */
static void *newest_known(const char *symbol, cuuint64_t flags)
{
    void *answer = NULL;
    CUresult result = REAL(cuGetProcAddress_v2) != NULL
                          ? CALL(cuGetProcAddress_v2, symbol, &answer, CUDA_VERSION, flags, NULL)
                          : CALL(cuGetProcAddress, symbol, &answer, CUDA_VERSION, flags);
    return result == CUDA_SUCCESS ? answer : NULL;
}

/* A variant that is newer than the header may take other arguments than any wrapper does: it stays the driver's own,
 * as an exported function does that libvgpu does not know (unknown.h). */
static void *map_answer(const char *symbol, void *answer, int version, cuuint64_t flags)
{
    Dl_info about;
    void *wrapper = wrapper_by_address(symbol, answer);
    if (wrapper != NULL)
        return wrapper;
    if (dladdr(answer, &about) != 0 && about.dli_sname != NULL && about.dli_saddr == answer) {
        int id = vgpu_wrapped(about.dli_sname);
        return id >= 0 ? vgpu_functions[id].wrapper : answer;
    }
    if (version > CUDA_VERSION && newest_known(symbol, flags) != answer)
        return answer;
    wrapper = wrapper_by_version(symbol, version, flags);
    return wrapper != NULL ? wrapper : answer;
}

VGPU_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
    vgpu_away_call();
    CUresult result = CALL(cuGetProcAddress, symbol, pfn, cudaVersion, flags);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = map_answer(symbol, *pfn, cudaVersion, flags);
    return result;
}

VGPU_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                         CUdriverProcAddressQueryResult *symbolStatus)
{
    vgpu_away_call();
    CUresult result = CALL(cuGetProcAddress_v2, symbol, pfn, cudaVersion, flags, symbolStatus);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = map_answer(symbol, *pfn, cudaVersion, flags);
    return result;
}
