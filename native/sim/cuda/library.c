/* Libraries: modules that are loaded once and used in every context. */
#include "internal.h"

struct CUlib_st {
    uint32_t magic;
    char *image; /* PTX text, copied; a binary image is kept by address, as its size is not known */
    CUmodule modules[CU_MAX_ORDINALS];
    struct CUkern_st *kernels;
};

struct CUkern_st {
    CUlibrary library;
    char *name;
    CUkernel next;
};

static bool is_library(CUlibrary library)
{
    return library != NULL && library->magic == CU_LIBRARY;
}

static CUresult module_of(CUlibrary library, CUcontext ctx, CUmodule *out)
{
    CUmodule *slot = &library->modules[ctx->ordinal];
    if (*slot == NULL || !cu_owned(&(*slot)->owner)) {
        CU_TRY(cu_module_load(ctx, library->image, slot));
        (*slot)->lazy = true;
    }
    *out = *slot;
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *jit, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count)
{
    CUcontext ctx;
    CUmodule module;
    (void)jit;
    (void)jit_values;
    (void)jit_count;
    (void)options;
    (void)values;
    (void)count;
    CU_TRY(cu_enter_context("cuLibraryLoadData", &ctx));
    CU_CHECK(out != NULL && code != NULL, CUDA_ERROR_INVALID_VALUE);
    CUlibrary library = calloc(1, sizeof(*library));
    CU_CHECK(library != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    library->magic = CU_LIBRARY;
    library->image = (char *)(uintptr_t)code;
    CUresult result = module_of(library, ctx, &module);
    if (result == CUDA_SUCCESS && module->text != NULL) {
        library->image = strdup(code);
        result = library->image == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        *out = library;
    else
        free(library);
    return result;
}

CUresult cuLibraryUnload(CUlibrary library)
{
    CU_TRY(cu_enter("cuLibraryUnload"));
    CU_CHECK(is_library(library), CUDA_ERROR_INVALID_HANDLE);
    bool text = false;
    for (int i = 0; i < CU_MAX_ORDINALS; i++) {
        if (library->modules[i] == NULL)
            continue;
        text = text || library->modules[i]->text != NULL;
        cuModuleUnload(library->modules[i]);
    }
    while (library->kernels != NULL) {
        CUkernel k = library->kernels;
        library->kernels = k->next;
        free(k->name);
        free(k);
    }
    if (text)
        free(library->image);
    library->magic = CU_DEAD;
    free(library);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule *out, CUlibrary library)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuLibraryGetModule", &ctx));
    CU_CHECK(is_library(library), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    return module_of(library, ctx, out);
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
    CUmodule module;
    CUfunction f;
    CU_CHECK(out != NULL && name != NULL, CUDA_ERROR_INVALID_VALUE);
    CU_TRY(cuLibraryGetModule(&module, library));
    CU_TRY(cuModuleGetFunction(&f, module, name));
    for (CUkernel k = library->kernels; k != NULL; k = k->next) {
        if (strcmp(k->name, name) == 0) {
            *out = k;
            return CUDA_SUCCESS;
        }
    }
    CUkernel k = calloc(1, sizeof(*k));
    char *copy = strdup(name);
    if (k == NULL || copy == NULL) {
        free(k);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *k = (struct CUkern_st){library, copy, library->kernels};
    library->kernels = k;
    *out = k;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel)
{
    CUmodule module;
    CU_CHECK(kernel != NULL && is_library(kernel->library), CUDA_ERROR_INVALID_HANDLE);
    CU_TRY(cuLibraryGetModule(&module, kernel->library));
    return cuModuleGetFunction(out, module, kernel->name);
}
