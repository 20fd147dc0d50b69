/*
 * module.c: the memory of code: globals, the heap and buffers of device functions, local memory.
 *
 * A module's memory is known when it is loaded; a module that exceeds the limit is unloaded again. Local memory is a
 * pool of each context, large enough for the most demanding function that ran, on all threads that fit on the device:
 * 16 KiB per thread are 4.2 GiB on an H200. The driver enlarges it at the launch, which cannot be refused. So libvgpu
 * enlarges it when the function is looked up, through the same limit that the driver uses (CU_LIMIT_STACK_SIZE).
 */
#include "module.h"

#include <stdint.h>

#include "suspended.h"
#include "capture.h"
#include "charge.h"
#include "device.h"
#include "functions.h"
#include "driver_overhead.h"
#include "tenant.h"

/*
 * Handles of functions whose memory was measured, by hash. A program may look up a function before each launch (NCCL
 * does), and a measurement takes about 100 us. A collision costs one more measurement.
 */
#define MEASURED_BITS 10
static uint64_t measured[1u << MEASURED_BITS];

void vgpu_module_forget(void)
{
    for (unsigned i = 0; i < 1u << MEASURED_BITS; i++)
        __atomic_store_n(&measured[i], 0, __ATOMIC_RELAXED);
}

static uint64_t *place_of(CUfunction function)
{
    return &measured[((uint64_t)(uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - MEASURED_BITS)];
}

static bool is_measured(CUfunction function)
{
    return __atomic_load_n(place_of(function), __ATOMIC_RELAXED) == (uint64_t)(uintptr_t)function;
}

/* Returns the index in the lease of the current context's device, or VGPU_NOT_IN_LEASE. */
static int limited_device(CUdevice *device)
{
    bool limited;
    if (vgpu_tenant_enter(&limited) != CUDA_SUCCESS || !limited || vgpu_device_current(device) != CUDA_SUCCESS)
        return VGPU_NOT_IN_LEASE;
    return vgpu_device_index(*device);
}

/*
 * Called after a call that made the driver allocate memory. Returns false if that exceeded the limit. Code that is
 * loaded lazily comes later, so the next allocation checks again.
 */
static bool fits(CUresult result)
{
    CUdevice device;
    int index = result == CUDA_SUCCESS ? limited_device(&device) : VGPU_NOT_IN_LEASE;
    if (index == VGPU_NOT_IN_LEASE || !vgpu_overhead_look(index, 0))
        return true;
    vgpu_overhead_later(index);
    return vgpu_overhead_within_limit(index);
}

static CUresult unloaded(CUresult result)
{
    CUdevice device;
    vgpu_module_forget();
    int index = result == CUDA_SUCCESS ? limited_device(&device) : VGPU_NOT_IN_LEASE;
    if (index != VGPU_NOT_IN_LEASE)
        vgpu_overhead_look(index, 0);
    return result;
}

static CUresult loaded(CUresult result, const CUmodule *module)
{
    if (fits(result))
        return result;
    unloaded(CALL(cuModuleUnload, *module));
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult loaded_library(CUresult result, const CUlibrary *library)
{
    if (fits(result))
        return result;
    unloaded(CALL(cuLibraryUnload, *library));
    return CUDA_ERROR_OUT_OF_MEMORY;
}

VGPU_EXPORT CUresult cuModuleLoad(CUmodule *module, const char *fname)
{
    vgpu_suspended_call();
    return loaded(CALL(cuModuleLoad, module, fname), module);
}

VGPU_EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    vgpu_suspended_call();
    return loaded(CALL(cuModuleLoadData, module, image), module);
}

VGPU_EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
                                        CUjit_option *options, void **optionValues)
{
    vgpu_suspended_call();
    return loaded(CALL(cuModuleLoadDataEx, module, image, numOptions, options, optionValues), module);
}

VGPU_EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    vgpu_suspended_call();
    return loaded(CALL(cuModuleLoadFatBinary, module, fatCubin), module);
}

VGPU_EXPORT CUresult cuModuleUnload(CUmodule hmod)
{
    vgpu_suspended_call();
    return unloaded(CALL(cuModuleUnload, hmod));
}

VGPU_EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
                                       void **jitOptionsValues, unsigned int numJitOptions,
                                       CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                       unsigned int numLibraryOptions)
{
    vgpu_suspended_call();
    return loaded_library(CALL(cuLibraryLoadData, library, code, jitOptions, jitOptionsValues, numJitOptions,
                               libraryOptions, libraryOptionValues, numLibraryOptions),
                          library);
}

VGPU_EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions,
                                           void **jitOptionsValues, unsigned int numJitOptions,
                                           CUlibraryOption *libraryOptions, void **libraryOptionValues,
                                           unsigned int numLibraryOptions)
{
    vgpu_suspended_call();
    return loaded_library(CALL(cuLibraryLoadFromFile, library, fileName, jitOptions, jitOptionsValues, numJitOptions,
                               libraryOptions, libraryOptionValues, numLibraryOptions),
                          library);
}

VGPU_EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    vgpu_suspended_call();
    return unloaded(CALL(cuLibraryUnload, library));
}

/*
 * Returns the number of threads that a device runs at once, for which local memory is made; 0 if the driver does not
 * report it.
 */
static uint64_t resident_threads(CUdevice device)
{
    int a_processor = 0;
    int processors = 0;
    if (CALL(cuDeviceGetAttribute, &a_processor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) !=
            CUDA_SUCCESS ||
        CALL(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        a_processor < 0 || processors < 0)
        return 0;
    return (uint64_t)a_processor * (uint64_t)processors;
}

static CUresult grow_local(int index, CUdevice device, size_t from, size_t to)
{
    struct vgpu_charge charge;
    CUresult result = vgpu_charge_index(&charge, index, (to - from) * resident_threads(device));
    if (result != CUDA_SUCCESS)
        return result;
    result = CALL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, to);
    vgpu_overhead_look(index, charge.bytes);
    vgpu_charge_undo(&charge, result);
    return result;
}

/*
 * Makes the local memory that a function needs. Returns false if it was not made: outside of the lease, during a
 * capture, which a change of limits would end, or after an error. The launch then makes it, and libvgpu measures it
 * afterwards; but above the limit *result is CUDA_ERROR_OUT_OF_MEMORY.
 */
static bool make_local(CUresult asked, int local_bytes, CUresult *result)
{
    CUdevice device;
    size_t now;
    int index = limited_device(&device);
    *result = CUDA_SUCCESS;
    if (index == VGPU_NOT_IN_LEASE)
        return false;
    vgpu_overhead_later(index); /* the code may be loaded only at the launch, so the memory is measured later */
    if (asked != CUDA_SUCCESS || vgpu_capture_any() || CALL(cuCtxGetLimit, &now, CU_LIMIT_STACK_SIZE) != CUDA_SUCCESS)
        return false;
    CUresult grown = local_bytes > 0 && (size_t)local_bytes > now ? grow_local(index, device, now, (size_t)local_bytes)
                                                                  : CUDA_SUCCESS;
    if (grown == CUDA_ERROR_OUT_OF_MEMORY)
        *result = grown;
    return grown == CUDA_SUCCESS;
}

static CUresult looked_up(CUresult result, CUfunction function)
{
    int local_bytes = 0;
    if (result != CUDA_SUCCESS || is_measured(function))
        return result;
    CUresult asked = CALL(cuFuncGetAttribute, &local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);
    if (make_local(asked, local_bytes, &result))
        __atomic_store_n(place_of(function), (uint64_t)(uintptr_t)function, __ATOMIC_RELAXED);
    return result;
}

VGPU_EXPORT CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuModuleGetFunction, hfunc, hmod, name);
    return looked_up(result, result == CUDA_SUCCESS ? *hfunc : NULL);
}

VGPU_EXPORT CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
    vgpu_suspended_call();
    CUresult result = CALL(cuKernelGetFunction, pFunc, kernel);
    return looked_up(result, result == CUDA_SUCCESS ? *pFunc : NULL);
}

/* A kernel belongs to no context, so its memory is measured each time, on the current device. */
VGPU_EXPORT CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
    vgpu_suspended_call();
    CUdevice device;
    int local_bytes = 0;
    CUresult result = CALL(cuLibraryGetKernel, pKernel, library, name);
    if (result != CUDA_SUCCESS || limited_device(&device) == VGPU_NOT_IN_LEASE)
        return result;
    CUresult asked = CALL(cuKernelGetAttribute, &local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, *pKernel, device);
    make_local(asked, local_bytes, &result);
    return result;
}

/* The stack is resized at once. The other limits take effect when a module that uses them is loaded. */
VGPU_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    vgpu_suspended_call();
    CUdevice device;
    size_t now;
    int index = limited_device(&device);
    if (index == VGPU_NOT_IN_LEASE)
        return CALL(cuCtxSetLimit, limit, value);
    if (limit == CU_LIMIT_STACK_SIZE && CALL(cuCtxGetLimit, &now, limit) == CUDA_SUCCESS && value > now)
        return grow_local(index, device, now, value);
    CUresult result = CALL(cuCtxSetLimit, limit, value);
    vgpu_module_forget(); /* the limit of the stack may be lower now, so each function is measured again */
    vgpu_overhead_look(index, 0);
    return result;
}
