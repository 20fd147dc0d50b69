/*
 * Modules. The driver searches PTX for its entry points and globals by name, and compiles nothing: a kernel only takes
 * time. `// vgpu-sim-microseconds=N` in the text sets this time.
 */
#include <ctype.h>

#include "internal.h"

struct cu_global {
    char *name;
    CUdeviceptr address;
    size_t size;
    struct cu_global *next;
};

static bool is_binary(const unsigned char *image)
{
    uint32_t word;
    memcpy(&word, image, sizeof(word));
    /* magic numbers of ELF files and of fat binaries */
    return word == 0x464c457f || word == 0x466243b1 || word == 0xBA55ED50;
}

static size_t name_length(const char *p)
{
    size_t n = 0;
    while (isalnum((unsigned char)p[n]) || p[n] == '_' || p[n] == '$' || p[n] == '%')
        n++;
    return n;
}

static const char *skip_space(const char *p)
{
    return p + strspn(p, " \t\r\n");
}

/* Returns the next `.entry NAME` at or after p; NULL at the end of the text. */
static const char *next_entry(const char *p, size_t *length)
{
    while ((p = strstr(p, ".entry")) != NULL) {
        p += strlen(".entry");
        const char *name = skip_space(p);
        *length = name_length(name);
        if (name > p && *length > 0)
            return name;
    }
    return NULL;
}

static CUfunction add_function(CUmodule m, const char *name, size_t length)
{
    CUfunction f = calloc(1, sizeof(*f));
    char *copy = strndup(name, length);
    if (f == NULL || copy == NULL) {
        free(f);
        free(copy);
        return NULL;
    }
    f->magic = CU_FUNCTION;
    f->module = m;
    f->name = copy;
    f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    f->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    f->next = m->functions;
    m->functions = f;
    return f;
}

/* Returns the size that a global's declaration gives (`.global .align 4 .b8 NAME[64]`, `.global .u32 NAME`), or 0. */
static size_t global_size(const char *text, const char *name)
{
    for (const char *p = text; (p = strstr(p, ".global")) != NULL; p++) {
        const char *end = p + strcspn(p, ";=");
        const char *at = memmem(p, (size_t)(end - p), name, strlen(name));
        if (at == NULL || name_length(at) != strlen(name))
            continue;
        size_t element = 1, count = 1;
        for (const char *t = at; t > p; t--) {
            unsigned bits;
            if ((t[-1] == 'b' || t[-1] == 'u' || t[-1] == 's' || t[-1] == 'f') && sscanf(t, "%u", &bits) == 1 &&
                bits >= 8 && bits <= 64) {
                element = bits / 8;
                break;
            }
        }
        const char *bracket = at + strlen(name);
        if (*bracket == '[')
            count = strtoul(bracket + 1, NULL, 10);
        return element * count;
    }
    return 0;
}

CUresult cu_module_load(CUcontext ctx, const void *image, CUmodule *out)
{
    CU_CHECK(image != NULL && out != NULL, CUDA_ERROR_INVALID_VALUE);
    CUmodule m = calloc(1, sizeof(*m));
    CU_CHECK(m != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    m->magic = CU_MODULE;
    m->ctx = ctx;
    m->owner = cu_owner_of(ctx);
    if (!is_binary(image)) {
        const char *text = image, *duration;
        if (strstr(text, ".version") == NULL || (m->text = strdup(text)) == NULL) {
            free(m);
            return CUDA_ERROR_INVALID_IMAGE;
        }
        duration = strstr(text, "vgpu-sim-microseconds=");
        if (duration != NULL)
            m->kernel_us = atof(strchr(duration, '=') + 1);
        m->waits = strstr(text, "// vgpu-sim-waits") != NULL;
        m->digests = strstr(text, "// vgpu-sim-digest") != NULL;
        size_t length;
        for (const char *p = next_entry(text, &length); p != NULL; p = next_entry(p, &length))
            add_function(m, p, length);
    }
    *out = m;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuModuleLoadData", &ctx));
    CU_CHECK(image != NULL && out != NULL, CUDA_ERROR_INVALID_VALUE);
    return cu_module_load(ctx, image, out);
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    (void)count;
    (void)options;
    (void)values;
    return cuModuleLoadData(out, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image)
{
    return cuModuleLoadData(out, image);
}

CUresult cuModuleLoad(CUmodule *out, const char *path)
{
    CUcontext ctx;
    CU_TRY(cu_enter_context("cuModuleLoad", &ctx));
    CU_CHECK(out != NULL && path != NULL, CUDA_ERROR_INVALID_VALUE);
    FILE *f = fopen(path, "re");
    CU_CHECK(f != NULL, CUDA_ERROR_FILE_NOT_FOUND);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    char *image = size < 0 ? NULL : calloc(1, (size_t)size + 4);
    if (image != NULL && fread(image, 1, (size_t)size, f) == (size_t)size)
        result = cu_module_load(ctx, image, out);
    free(image);
    fclose(f);
    return result;
}

static bool is_module(CUmodule m)
{
    return m != NULL && m->magic == CU_MODULE && cu_owned(&m->owner);
}

static void free_globals(CUmodule m)
{
    while (m->globals != NULL) {
        struct cu_global *g = m->globals;
        m->globals = g->next;
        cu_free(g->address);
        free(g->name);
        free(g);
    }
}

CUresult cuModuleUnload(CUmodule m)
{
    CU_TRY(cu_enter("cuModuleUnload"));
    CU_CHECK(is_module(m), CUDA_ERROR_INVALID_HANDLE);
    cu_lock();
    free_globals(m);
    while (m->functions != NULL) {
        CUfunction f = m->functions;
        m->functions = f->next;
        f->magic = CU_DEAD;
        free(f->name);
        free(f);
    }
    m->magic = CU_DEAD;
    cu_unlock();
    free(m->text);
    free(m);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule m, const char *name)
{
    CU_TRY(cu_enter("cuModuleGetFunction"));
    CU_CHECK(is_module(m), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(out != NULL && name != NULL && *name != '\0', CUDA_ERROR_INVALID_VALUE);
    cu_lock();
    CUfunction f = m->functions;
    while (f != NULL && strcmp(f->name, name) != 0)
        f = f->next;
    if (f == NULL && m->text == NULL)
        f = add_function(m, name, strlen(name));
    cu_unlock();
    CU_CHECK(f != NULL, CUDA_ERROR_NOT_FOUND);
    *out = f;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule m)
{
    CU_TRY(cu_enter("cuModuleGetFunctionCount"));
    CU_CHECK(is_module(m), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(count != NULL, CUDA_ERROR_INVALID_VALUE);
    *count = 0;
    for (CUfunction f = m->functions; f != NULL; f = f->next)
        ++*count;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    CU_CHECK(mode != NULL, CUDA_ERROR_INVALID_VALUE);
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

static struct cu_global *add_global(CUmodule m, const char *name, size_t size)
{
    struct cu_global *g = calloc(1, sizeof(*g));
    if (g == NULL)
        return NULL;
    g->name = strdup(name);
    g->size = size;
    if (g->name == NULL || cu_alloc(m->ctx, SIM_PLAIN, NULL, size, &g->address) != CUDA_SUCCESS) {
        free(g->name);
        free(g);
        return NULL;
    }
    g->next = m->globals;
    m->globals = g;
    return g;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *size, CUmodule m, const char *name)
{
    CU_TRY(cu_enter("cuModuleGetGlobal_v2"));
    CU_CHECK(is_module(m), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    size_t bytes = m->text == NULL ? 0 : global_size(m->text, name);
    CU_CHECK(bytes > 0, CUDA_ERROR_NOT_FOUND);
    cu_lock();
    struct cu_global *g = m->globals;
    while (g != NULL && strcmp(g->name, name) != 0)
        g = g->next;
    if (g == NULL)
        g = add_global(m, name, bytes);
    cu_unlock();
    CU_CHECK(g != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    if (out != NULL)
        *out = g->address;
    if (size != NULL)
        *size = g->size;
    return CUDA_SUCCESS;
}

bool cu_is_function(CUfunction f)
{
    return f != NULL && f->magic == CU_FUNCTION && cu_owned(&f->module->owner);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f)
{
    CU_TRY(cu_enter_suspended("cuFuncGetAttribute"));
    CU_CHECK(cu_is_function(f), CUDA_ERROR_INVALID_HANDLE);
    if (f->module->lazy)
        CU_TRY(cu_gate());
    CU_CHECK(value != NULL && attribute < CU_FUNC_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    *value = f->attributes[attribute];
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value)
{
    CU_TRY(cu_enter("cuFuncSetAttribute"));
    CU_CHECK(cu_is_function(f), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(attribute < CU_FUNC_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    f->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config)
{
    CU_TRY(cu_enter("cuFuncSetCacheConfig"));
    (void)config;
    return cu_is_function(f) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncGetModule(CUmodule *m, CUfunction f)
{
    CU_TRY(cu_enter("cuFuncGetModule"));
    CU_CHECK(cu_is_function(f), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(m != NULL, CUDA_ERROR_INVALID_VALUE);
    *m = f->module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction f)
{
    CU_TRY(cu_enter("cuFuncGetName"));
    CU_CHECK(cu_is_function(f), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    *name = f->name;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction f, int block, size_t shared)
{
    CU_TRY(cu_enter("cuOccupancyMaxActiveBlocksPerMultiprocessor"));
    CU_CHECK(cu_is_function(f), CUDA_ERROR_INVALID_HANDLE);
    CU_CHECK(count != NULL && block > 0, CUDA_ERROR_INVALID_VALUE);
    const struct sim_device *card = cu_sim_device(f->module->ctx->ordinal);
    int by_threads = (int)card->multi_processor_threads / ((block + 31) / 32 * 32);
    int by_shared = shared == 0 ? 32 : (int)(card->shared_memory_per_sm_bytes / shared);
    *count = by_threads < by_shared ? by_threads : by_shared;
    if (*count > 32)
        *count = 32;
    return CUDA_SUCCESS;
}
