/*
 * cuda_conformance_objects.c: objects made from others. Green contexts, textures and surfaces, pools, and external
 * memory by file descriptor.
 */
#include <fcntl.h>
#include <unistd.h>

#include "cuda_conformance.h"

static CUresult split(CUdevResource *out, unsigned *count, const CUdevResource *of, CUdevResource *rest, unsigned flags,
                      unsigned least)
{
    return CALL(cuDevSmResourceSplitByCount,
                (CUdevResource *, unsigned *, const CUdevResource *, CUdevResource *, unsigned, unsigned), out, count,
                of, rest, flags, least);
}

static CUresult describe(CUdevResourceDesc *desc, CUdevResource *of, unsigned count)
{
    return CALL(cuDevResourceGenerateDesc, (CUdevResourceDesc *, CUdevResource *, unsigned), desc, of, count);
}

static void say_split(const char *name, const CUdevResource *of, unsigned flags, unsigned least)
{
    char text[96];
    CUdevResource parts[64], rest;
    unsigned count = 64;
    memset(&rest, 0, sizeof(rest));
    CUresult result = split(parts, &count, of, &rest, flags, least);
    snprintf(text, sizeof(text), "green: split %s", name);
    say(text, result);
    snprintf(text, sizeof(text), "green: split %s: groups, size, rest", name);
    say(text, result != CUDA_SUCCESS ? -1 : (long long)count * 1000000 + parts[0].sm.smCount * 1000 + rest.sm.smCount);
}

static void resources(void)
{
    CUdevResource all, part, both[2];
    CUdevResourceDesc desc;
    unsigned one = 1, none = 0;
    say("green: device",
        CALL(cuDeviceGetDevResource, (CUdevice, CUdevResource *, CUdevResourceType), 0, &all, CU_DEV_RESOURCE_TYPE_SM));
    say("green: least part", all.sm.minSmPartitionSize);
    say("green: alignment", all.sm.smCoscheduledAlignment);
    say("green: device, no type", CALL(cuDeviceGetDevResource, (CUdevice, CUdevResource *, CUdevResourceType), 0, &part,
                                       CU_DEV_RESOURCE_TYPE_INVALID));
    say_split("16", &all, 0, 16);
    say_split("17", &all, 0, 17);
    say_split("0", &all, 0, 0);
    say_split("of all but one", &all, 0, all.sm.smCount - 1);
    say_split("of one too many", &all, 0, all.sm.smCount + 1);
    say_split("10, finely", &all, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, 10);
    say_split("with a flag unknown", &all, 8, 16);
    say("green: split asked for", split(NULL, &none, &all, NULL, 0, 16));
    say("green: split asked for: groups", none);
    say("green: split into one", split(&part, &one, &all, &both[1], 0, 16));
    say_split("of a part", &part, 0, 8);
    say("green: describe", describe(&desc, &part, 1));
    say("green: describe none", describe(&desc, &part, 0));
    both[0] = part;
    say("green: describe part and rest", describe(&desc, both, 2));
    both[1] = all;
    say("green: describe part and whole", describe(&desc, both, 2));
}

static void greens(CUcontext primary)
{
    CUdevResource all, part, of;
    CUdevResourceDesc desc;
    CUgreenCtx green, found = NULL;
    CUcontext ctx, now = NULL;
    CUstream stream;
    CUevent event;
    unsigned one = 1;
    int priority = 7;
    CALL(cuDeviceGetDevResource, (CUdevice, CUdevResource *, CUdevResourceType), 0, &all, CU_DEV_RESOURCE_TYPE_SM);
    split(&part, &one, &all, NULL, 0, 16);
    describe(&desc, &part, 1);
    say("green: create, flags 0",
        CALL(cuGreenCtxCreate, (CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned), &green, desc, 0, 0));
    say("green: create, flags 2",
        CALL(cuGreenCtxCreate, (CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned), &green, desc, 0, 2));
    mark();
    say("green: create", CALL(cuGreenCtxCreate, (CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned), &green, desc, 0,
                              CU_GREEN_CTX_DEFAULT_STREAM));
    used("green: create: bytes");
    say("green: context", CALL(cuCtxFromGreenCtx, (CUcontext *, CUgreenCtx), &ctx, green));
    say("green: its SMs", CALL(cuGreenCtxGetDevResource, (CUgreenCtx, CUdevResource *, CUdevResourceType), green, &of,
                               CU_DEV_RESOURCE_TYPE_SM));
    say("green: its SMs: count", of.sm.smCount);
    say("green: the primary's SMs", CALL(cuCtxGetDevResource, (CUcontext, CUdevResource *, CUdevResourceType), primary,
                                         &of, CU_DEV_RESOURCE_TYPE_SM));
    say("green: the primary's SMs: as the device's", of.sm.smCount == all.sm.smCount);
    say("green: stream, flags 0",
        CALL(cuGreenCtxStreamCreate, (CUstream *, CUgreenCtx, unsigned, int), &stream, green, 0, 0));
    say("green: stream", CALL(cuGreenCtxStreamCreate, (CUstream *, CUgreenCtx, unsigned, int), &stream, green,
                              CU_STREAM_NON_BLOCKING, -9));
    CALL(cuStreamGetPriority, (CUstream, int *), stream, &priority);
    say("green: stream's priority", priority);
    CALL(cuStreamGetCtx, (CUstream, CUcontext *), stream, &now);
    say("green: stream's context is the green one's", now == ctx);
    say("green: of the stream", CALL(cuStreamGetGreenCtx, (CUstream, CUgreenCtx *), stream, &found));
    say("green: of the stream: it", found == green);
    say("green: launch", launch(stream, 1, 32, 0));
    CALL(cuEventCreate, (CUevent *, unsigned), &event, 0);
    say("green: record", CALL(cuGreenCtxRecordEvent, (CUgreenCtx, CUevent), green, event));
    say("green: wait", CALL(cuGreenCtxWaitEvent, (CUgreenCtx, CUevent), green, event));
    say("whole context: record", CALL(cuCtxRecordEvent, (CUcontext, CUevent), primary, event));
    say("whole context: record in the green one's", CALL(cuCtxRecordEvent, (CUcontext, CUevent), ctx, event));
    say("whole context: wait", CALL(cuCtxWaitEvent, (CUcontext, CUevent), primary, event));
    say("green: synchronise", CALL(cuEventSynchronize, (CUevent), event));
    CALL(cuEventDestroy_v2, (CUevent), event);
    say("green: destroy", CALL(cuGreenCtxDestroy, (CUgreenCtx), green));
    say("green: stream afterwards", CALL(cuStreamQuery, (CUstream), stream));
    say("green: stream's end", CALL(cuStreamDestroy_v2, (CUstream), stream));
}

static CUresult texture(CUtexObject *t, const CUDA_RESOURCE_DESC *of, const CUDA_TEXTURE_DESC *how,
                        const CUDA_RESOURCE_VIEW_DESC *view)
{
    return CALL(cuTexObjectCreate,
                (CUtexObject *, const CUDA_RESOURCE_DESC *, const CUDA_TEXTURE_DESC *, const CUDA_RESOURCE_VIEW_DESC *),
                t, of, how, view);
}

static CUDA_RESOURCE_DESC linear(CUdeviceptr p, size_t size, unsigned channels)
{
    CUDA_RESOURCE_DESC r = {.resType = CU_RESOURCE_TYPE_LINEAR};
    r.res.linear.devPtr = p;
    r.res.linear.format = CU_AD_FORMAT_FLOAT;
    r.res.linear.numChannels = channels;
    r.res.linear.sizeInBytes = size;
    return r;
}

static CUDA_RESOURCE_DESC rows(CUdeviceptr p, size_t width, size_t height, size_t pitch)
{
    CUDA_RESOURCE_DESC r = {.resType = CU_RESOURCE_TYPE_PITCH2D};
    r.res.pitch2D.devPtr = p;
    r.res.pitch2D.format = CU_AD_FORMAT_FLOAT;
    r.res.pitch2D.numChannels = 1;
    r.res.pitch2D.width = width;
    r.res.pitch2D.height = height;
    r.res.pitch2D.pitchInBytes = pitch;
    return r;
}

static void say_texture(const char *name, CUDA_RESOURCE_DESC of, CUDA_TEXTURE_DESC how)
{
    char text[96];
    CUtexObject t;
    CUresult result = texture(&t, &of, &how, NULL);
    snprintf(text, sizeof(text), "texture: %s", name);
    say(text, result);
    if (result == CUDA_SUCCESS)
        CALL(cuTexObjectDestroy, (CUtexObject), t);
}

static void textures(void)
{
    CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUDA_TEXTURE_DESC plain = {.filterMode = CU_TR_FILTER_MODE_POINT}, how = plain;
    CUDA_RESOURCE_DESC of = {.resType = CU_RESOURCE_TYPE_ARRAY}, back;
    CUDA_RESOURCE_VIEW_DESC view = {.format = CU_RES_VIEW_FORMAT_FLOAT_4X32, .width = 64, .height = 64};
    CUdeviceptr p;
    CUarray array, written;
    CUtexObject t;
    CUsurfObject s;
    alloc(&p, 4 * MIB);
    CALL(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &array, &shape);
    shape.Flags = CUDA_ARRAY3D_SURFACE_LDST;
    CALL(cuArray3DCreate_v2, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *), &written, &shape);
    of.res.array.hArray = array;
    say_texture("array", of, plain);
    say_texture("linear", linear(p, MIB, 4), plain);
    say_texture("linear, half a line on", linear(p + 256, MIB, 4), plain);
    say_texture("linear, 16 bytes on", linear(p + 16, MIB, 4), plain);
    say_texture("linear, of nothing", linear(p, 0, 4), plain);
    say_texture("linear, 3 channels", linear(p, MIB, 3), plain);
    say_texture("rows", rows(p, 100, 50, 416), plain);
    say_texture("rows wider than their pitch", rows(p, 105, 50, 416), plain);
    say_texture("rows of an odd pitch", rows(p, 100, 50, 417), plain);
    say_texture("no rows", rows(p, 100, 0, 416), plain);
    how.filterMode = (CUfilter_mode)2;
    say_texture("filter unknown", of, how);
    how = plain;
    how.addressMode[0] = (CUaddress_mode)4;
    say_texture("address mode unknown", of, how);
    back = linear(p, MIB, 4);
    say("texture: linear, viewed", texture(&t, &back, &plain, &view));
    say("texture: viewed", texture(&t, &of, &plain, &view));
    say("texture: view told", CALL(cuTexObjectGetResourceViewDesc, (CUDA_RESOURCE_VIEW_DESC *, CUtexObject), &view, t));
    say("texture: resource told", CALL(cuTexObjectGetResourceDesc, (CUDA_RESOURCE_DESC *, CUtexObject), &back, t));
    say("texture: resource told: the array", back.resType == CU_RESOURCE_TYPE_ARRAY && back.res.array.hArray == array);
    CALL(cuTexObjectDestroy, (CUtexObject), t);
    texture(&t, &of, &plain, NULL);
    say("texture: no view told",
        CALL(cuTexObjectGetResourceViewDesc, (CUDA_RESOURCE_VIEW_DESC *, CUtexObject), &view, t));
    CALL(cuTexObjectDestroy, (CUtexObject), t);
    say("surface: of an array not made for it",
        CALL(cuSurfObjectCreate, (CUsurfObject *, const CUDA_RESOURCE_DESC *), &s, &of));
    of.res.array.hArray = written;
    say("surface", CALL(cuSurfObjectCreate, (CUsurfObject *, const CUDA_RESOURCE_DESC *), &s, &of));
    say("surface: end", CALL(cuSurfObjectDestroy, (CUsurfObject), s));
    back = linear(p, MIB, 4);
    say("surface: of memory", CALL(cuSurfObjectCreate, (CUsurfObject *, const CUDA_RESOURCE_DESC *), &s, &back));
    CALL(cuArrayDestroy, (CUarray), array);
    CALL(cuArrayDestroy, (CUarray), written);
    drop(p);
}

static void shared_pools(void)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    const CUmemAllocationHandleType fd_type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemoryPool pool, own, taken;
    CUmemPoolPtrExportData data;
    CUdeviceptr p, q;
    int fd = -1;
    CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &own, &props);
    say("shared pool: of one not made for it",
        CALL(cuMemPoolExportToShareableHandle, (void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long),
             &fd, own, fd_type, 0));
    CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, MIB, own, NULL);
    say("shared pool: pointer of one not made for it",
        CALL(cuMemPoolExportPointer, (CUmemPoolPtrExportData *, CUdeviceptr), &data, p));
    CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), p, NULL);
    CALL(cuMemPoolDestroy, (CUmemoryPool), own);
    props.handleTypes = fd_type;
    say("shared pool", CALL(cuMemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *), &pool, &props));
    mark();
    say("shared pool: alloc",
        CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &p, MIB, pool, NULL));
    CALL(cuCtxSynchronize, (void));
    used("shared pool: alloc: bytes");
    say("shared pool: export, flags 1",
        CALL(cuMemPoolExportToShareableHandle, (void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long),
             &fd, pool, fd_type, 1));
    say("shared pool: export",
        CALL(cuMemPoolExportToShareableHandle, (void *, CUmemoryPool, CUmemAllocationHandleType, unsigned long long),
             &fd, pool, fd_type, 0));
    say("shared pool: export a pointer",
        CALL(cuMemPoolExportPointer, (CUmemPoolPtrExportData *, CUdeviceptr), &data, p));
    mark();
    CUresult result = CALL(cuMemPoolImportFromShareableHandle,
                           (CUmemoryPool *, void *, CUmemAllocationHandleType, unsigned long long), &taken,
                           (void *)(intptr_t)fd, fd_type, 0);
    say("shared pool: import in the same process", result);
    if (result == CUDA_SUCCESS) {
        say("shared pool: alloc from the imported",
            CALL(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream), &q, MIB, taken, NULL));
        say("shared pool: the imported as the device's", CALL(cuDeviceSetMemPool, (CUdevice, CUmemoryPool), 0, taken));
        say("shared pool: pointer into the pool's own",
            CALL(cuMemPoolImportPointer, (CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *), &q, pool, &data));
        result = CALL(cuMemPoolImportPointer, (CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *), &q, taken,
                      &data);
        say("shared pool: pointer", result);
        used("shared pool: pointer: bytes");
        if (result == CUDA_SUCCESS)
            say("shared pool: pointer freed", CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), q, NULL));
        CALL(cuCtxSynchronize, (void));
        say("shared pool: the imported ends", CALL(cuMemPoolDestroy, (CUmemoryPool), taken));
    }
    close(fd);
    CALL(cuMemFreeAsync, (CUdeviceptr, CUstream), p, NULL);
    CALL(cuCtxSynchronize, (void));
    say("shared pool: ends", CALL(cuMemPoolDestroy, (CUmemoryPool), pool));
}

static CUresult import(CUexternalMemory *out, CUexternalMemoryHandleType type, int fd, unsigned long long size)
{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC desc = {.type = type, .handle = {.fd = fd}, .size = size};
    return CALL(cuImportExternalMemory, (CUexternalMemory *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *), out, &desc);
}

static CUresult map(CUdeviceptr *p, CUexternalMemory memory, unsigned long long offset, unsigned long long size)
{
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC desc = {.offset = offset, .size = size};
    return CALL(cuExternalMemoryGetMappedBuffer,
                (CUdeviceptr *, CUexternalMemory, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *), p, memory, &desc);
}

static void external(void)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUmemGenericAllocationHandle made;
    CUexternalMemory memory;
    CUdeviceptr p;
    int fd, other = open("/dev/null", O_RDWR | O_CLOEXEC);
    CALL(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long), &made,
         4 * MIB, &prop, 0);
    CALL(cuMemExportToShareableHandle,
         (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long), &fd, made,
         prop.requestedHandleTypes, 0);
    say("external: of a file", import(&memory, CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, other, 4 * MIB));
    say("external: of nothing", import(&memory, CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, fd, 0));
    say("external: of a kind for another system",
        import(&memory, CU_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP, fd, 4 * MIB));
    say("external: of no kind", import(&memory, (CUexternalMemoryHandleType)0, fd, 4 * MIB));
    close(other);
    mark();
    CUresult result = import(&memory, CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, fd, 4 * MIB);
    say("external: of a VMM allocation", result);
    if (result == CUDA_SUCCESS) {
        say("external: mapped past the end", map(&p, memory, 3 * MIB, 2 * MIB));
        result = map(&p, memory, 2 * MIB, 2 * MIB);
        say("external: mapped", result);
        used("external: mapped: bytes");
        if (result == CUDA_SUCCESS)
            say("external: unmapped", drop(p));
        say("external: ends", CALL(cuDestroyExternalMemory, (CUexternalMemory), memory));
    }
    CALL(cuMemRelease, (CUmemGenericAllocationHandle), made);
}

void objects(CUcontext ctx)
{
    resources();
    greens(ctx);
    textures();
    shared_pools();
    external();
}
