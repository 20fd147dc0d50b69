#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct driver cu;

#ifdef PROBE_LINKED
static bool load_direct(void)
{
#define SYMBOL(name) cu.name = &name;
#include "symbols.def"
#undef SYMBOL
    return true;
}
#else
static bool load_direct(void)
{
    fputs("vgpu-probe-dl: built without linking to libcuda; use vgpu-probe\n", stderr);
    return false;
}
#endif

static void *driver_symbol(const char *name)
{
    static void *handle;
    if (handle == NULL)
        handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = handle != NULL ? dlsym(handle, name) : NULL;
    if (symbol == NULL)
        fprintf(stderr, "vgpu-probe: %s\n", dlerror());
    return symbol;
}

static bool load_dlsym(void)
{
    bool complete = true;
#define SYMBOL(name) complete &= (*(void **)&cu.name = driver_symbol(#name)) != NULL;
#include "symbols.def"
#undef SYMBOL
    return complete;
}

/* Looks a function up by its base name and version, as the CUDA runtime does. */
static void *proc_address(const char *symbol)
{
    char base[64];
    void *address = NULL;
    CUdriverProcAddressQueryResult status;
    snprintf(base, sizeof(base), "%s", symbol);
    char *suffix = strstr(base, "_v2");
    if (suffix != NULL)
        *suffix = '\0';
    if (cu.cuGetProcAddress_v2(base, &address, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS)
        fprintf(stderr, "vgpu-probe: cuGetProcAddress does not know %s\n", base);
    return address;
}

static bool load_proc_address(void)
{
    bool complete = true;
    *(void **)&cu.cuGetProcAddress_v2 = driver_symbol("cuGetProcAddress_v2");
    if (cu.cuGetProcAddress_v2 == NULL)
        return false;
#define SYMBOL(name) complete &= (*(void **)&cu.name = proc_address(#name)) != NULL;
#include "symbols.def"
#undef SYMBOL
    return complete;
}

bool driver_load(enum way way)
{
    if (way == WAY_DIRECT)
        return load_direct();
    return way == WAY_DLSYM ? load_dlsym() : load_proc_address();
}
