#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "functions.h"
#include "in_child.h"
#include "lease_limits.h"
#include "tenant.h"

#define ORDINALS 64 /* maximum of cached ordinals; a node has at most 16 GPUs or some dozens of MIG devices */

/*
 * Values of the cache: FIRST + index. They stay valid after a move, because the driver's ordinal stays that of the
 * slice.
 */
enum { UNKNOWN = 0, ABSENT = 1, FIRST = 2 };
static int cache[ORDINALS];
int vgpu_device_known_alone;

/*
 * Returns the device's UUID. Only the _v2 call returns a MIG device's own UUID; drivers before 11.4 have only the first
 * version.
 */
static CUresult device_uuid(CUdevice device, CUuuid *uuid)
{
    CUresult result = CALL(cuDeviceGetUuid_v2, uuid, device);
    return result == CUDA_ERROR_NOT_SUPPORTED ? CALL(cuDeviceGetUuid, uuid, device) : result;
}

static int look_up(CUdevice device)
{
    CUuuid uuid;
    char held[VGPU_UUID_BYTES];
    unsigned char wanted[16];
    if (device_uuid(device, &uuid) != CUDA_SUCCESS)
        return UNKNOWN;
    for (unsigned i = 0; i < vgpu_tenant_devices(); i++) {
        vgpu_tenant_uuid(i, held);
        if (vgpu_uuid_parse(held, wanted) == 0 && memcmp(wanted, uuid.bytes, 16) == 0)
            return FIRST + (int)i;
    }
    return ABSENT;
}

int vgpu_device_index(CUdevice device)
{
    if (device < 0 || device >= ORDINALS)
        return VGPU_NOT_IN_LEASE;
    int known = __atomic_load_n(&cache[device], __ATOMIC_RELAXED);
    if (known == UNKNOWN) {
        known = look_up(device);
        __atomic_store_n(&cache[device], known, __ATOMIC_RELAXED);
    }
    return known >= FIRST ? known - FIRST : VGPU_NOT_IN_LEASE;
}

void vgpu_device_tell_foreign(CUdevice device)
{
    static bool told;
    char held[VGPU_UUID_BYTES];
    char text[512];
    CUuuid uuid;
    if (__atomic_exchange_n(&told, true, __ATOMIC_RELAXED) || device_uuid(device, &uuid) != CUDA_SUCCESS)
        return;
    const unsigned char *b = (const unsigned char *)uuid.bytes;
    const char *allocation = getenv("VGPU_ALLOCATION");
    vgpu_tenant_uuid(0, held);
    int length = snprintf(
        text, sizeof(text),
        "libvgpu: CUDA device %d (GPU-%02x%02x%02x%02x) is refused: allocation %.64s has %.47s%s; was "
        "CUDA_VISIBLE_DEVICES changed?\n",
        device, b[0], b[1], b[2], b[3], allocation != NULL ? allocation : vgpu_tenant_folder(), held,
        vgpu_tenant_devices() > 1 ? " and others" : "");
    if (length > 0 && write(STDERR_FILENO, text, strnlen(text, sizeof(text))) < 0)
        return;
}

/* Returns whether the process sees exactly one device. Then libvgpu need not ask the driver which device is meant. */
static bool single(void)
{
    static int known; /* 0: the driver was not asked yet; 1: the process sees several devices; 2: one device */
    int count = 0;
    int now = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (now == 0 && CALL(cuDeviceGetCount, &count) == CUDA_SUCCESS) {
        now = count == 1 ? 2 : 1;
        __atomic_store_n(&known, now, __ATOMIC_RELAXED);
    }
    if (now == 2)
        __atomic_store_n(&vgpu_device_known_alone, vgpu_device_index(0) + 1, __ATOMIC_RELAXED);
    return now == 2;
}

CUresult vgpu_device_current(CUdevice *device)
{
    return CALL(cuCtxGetDevice, device);
}

CUresult vgpu_device_of_context(CUcontext context, CUdevice *device)
{
    CUcontext current = NULL;
    CUcontext popped;
    if (CALL(cuCtxGetCurrent, &current) == CUDA_SUCCESS && current == context)
        return vgpu_device_current(device);
    CUresult result = CALL(cuCtxPushCurrent_v2, context);
    if (result != CUDA_SUCCESS)
        return result;
    result = vgpu_device_current(device);
    CALL(cuCtxPopCurrent_v2, &popped);
    return result;
}

CUresult vgpu_device_of_stream(CUstream stream, int per_thread, CUdevice *device)
{
    CUcontext context = NULL;
    *device = 0;
    if (single())
        return CUDA_SUCCESS;
    if (stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return vgpu_device_current(device);
    CUresult result = per_thread ? CALL(cuStreamGetCtx_ptsz, stream, &context) : CALL(cuStreamGetCtx, stream, &context);
    return result == CUDA_SUCCESS ? vgpu_device_of_context(context, device) : result;
}

static void reset(void)
{
    memset(cache, 0, sizeof(cache));
    vgpu_device_known_alone = 0;
}
VGPU_IN_CHILD(reset);
