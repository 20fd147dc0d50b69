/*
 * failing.c: a libcuda.so.1 between libvgpu and the driver, whose path is FAILING_DRIVER. It passes each call on, but
 * for the one that fail_next() chose, which it answers itself with FAILURE. Allocations of libvgpu can fail, too.
 */
#include "failing.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* any arguments: more words than a function of the driver takes, on the stack too */
typedef long word;
#define PARAMETERS                                                                                                  \
    word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l, word m, word n, \
        word o, word p, word q, word r, word s, word t
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t

static __thread enum fail_kind chosen;
static __thread int countdown; /* calls of this thread until one fails; 0: none fails */
static __thread bool each;     /* each call of `only` fails */
static __thread const char *only;
static __thread const char *failed;
static const char *elsewhere; /* the function that fails in a thread but `armed`; NULL: none */
static pthread_t armed;
static uintptr_t start, end; /* libvgpu's code and data */

static void *driver(void)
{
    static void *handle;
    void *found = __atomic_load_n(&handle, __ATOMIC_ACQUIRE);
    if (found == NULL) {
        found = dlopen(getenv("FAILING_DRIVER"), RTLD_NOW | RTLD_LOCAL);
        __atomic_store_n(&handle, found, __ATOMIC_RELEASE);
    }
    return found;
}

static void *found(void **function, const char *name)
{
    void *known = __atomic_load_n(function, __ATOMIC_ACQUIRE);
    if (known == NULL) {
        known = dlsym(driver(), name);
        __atomic_store_n(function, known, __ATOMIC_RELEASE);
    }
    return known;
}

static bool fails_elsewhere(const char *name)
{
    const char *function = __atomic_load_n(&elsewhere, __ATOMIC_ACQUIRE);
    return function != NULL && !pthread_equal(pthread_self(), armed) && strcmp(function, name) == 0 &&
           __atomic_compare_exchange_n(&elsewhere, &function, NULL, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static bool fails(enum fail_kind kind, const char *name)
{
    if (kind == FAIL_CALL && fails_elsewhere(name))
        return true;
    bool now = kind == FAIL_CALL && each && (only == NULL || strcmp(only, name) == 0);
    if (!now && (countdown == 0 || kind != chosen || --countdown > 0))
        return false;
    failed = name;
    return true;
}

static int find_libvgpu(struct dl_phdr_info *object, size_t size, void *unused)
{
    (void)size, (void)unused;
    if (strstr(object->dlpi_name, "/libvgpu.so") == NULL)
        return 0;
    start = object->dlpi_addr;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_LOAD)
            end = start + object->dlpi_phdr[i].p_vaddr + object->dlpi_phdr[i].p_memsz;
    return 1;
}

API void fail_next(enum fail_kind kind, int call)
{
    if (start == 0)
        dl_iterate_phdr(find_libvgpu, NULL);
    chosen = kind;
    countdown = call;
    failed = NULL;
}

API void fail_each(const char *function)
{
    each = true;
    only = function;
}

API void fail_elsewhere(const char *function)
{
    armed = pthread_self();
    __atomic_store_n(&elsewhere, function, __ATOMIC_RELEASE);
}

API const char *fail_ended(void)
{
    each = false;
    countdown = 0;
    return failed;
}

API int fail_is_due(void)
{
    return __atomic_exchange_n(&elsewhere, NULL, __ATOMIC_ACQ_REL) != NULL;
}

API unsigned long fail_driver_free(void)
{
    size_t rest = 0, total;
    ((int (*)(size_t *, size_t *))dlsym(driver(), "cuMemGetInfo_v2"))(&rest, &total);
    return rest;
}

static bool no_memory(void *caller)
{
    return (uintptr_t)caller - start < end - start && fails(FAIL_MEMORY, "an allocation of libvgpu");
}

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);

API void *malloc(size_t bytes)
{
    return no_memory(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

API void *calloc(size_t count, size_t bytes)
{
    return no_memory(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

#define PASS_CUDA(symbol)                                     \
    API word symbol(PARAMETERS);                              \
    API word symbol(PARAMETERS)                               \
    {                                                         \
        static void *function;                                \
        if (fails(FAIL_CALL, #symbol))                        \
            return FAILURE;                                   \
        word (*real)(PARAMETERS) = found(&function, #symbol); \
        return real != NULL ? real(ARGUMENTS) : 801;          \
    }
#define PASS_NVML(symbol)
#define HOOK(symbol, library, family, since, what) PASS_##library(symbol)
#define USED(symbol, library) PASS_##library(symbol)
#define OPEN(symbol, family, reason) PASS_CUDA(symbol)
#include "hooks.def"
