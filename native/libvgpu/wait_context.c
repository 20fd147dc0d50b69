/* wait_context.c: calls for contexts and devices:
 * they need nothing of libvgpu but to wait in front of the driver while the
 * lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuCtxGetFlags, (unsigned int *flags), flags)
WAITS(cuCtxSetFlags, (unsigned int flags), flags)
WAITS(cuCtxGetLimit, (size_t *pvalue, CUlimit limit), pvalue, limit)
WAITS(cuCtxGetCacheConfig, (CUfunc_cache * pconfig), pconfig)
WAITS(cuCtxSetCacheConfig, (CUfunc_cache config), config)
WAITS(cuCtxGetSharedMemConfig, (CUsharedconfig * pConfig), pConfig)
WAITS(cuCtxSetSharedMemConfig, (CUsharedconfig config), config)
VGPU_EXPORT CUresult cuCtxResetPersistingL2Cache(void)
{
    vgpu_away_call();
    return CALL(cuCtxResetPersistingL2Cache);
}
WAITS(cuCtxEnablePeerAccess, (CUcontext peerContext, unsigned int Flags), peerContext, Flags)
WAITS(cuCtxDisablePeerAccess, (CUcontext peerContext), peerContext)
/* Asked often, and answered from the driver's own memory; not so the clocks (304 of an H200, driver 580.159.04). */
VGPU_EXPORT CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    CUresult result = CALL(cuDeviceGetAttribute, pi, attrib, dev);
    if (result != CUDA_ERROR_OPERATING_SYSTEM || !vgpu_away_now())
        return result;
    vgpu_away_call();
    return CALL(cuDeviceGetAttribute, pi, attrib, dev);
}
WAITS(cuDeviceGetName, (char *name, int len, CUdevice dev), name, len, dev)
WAITS(cuDeviceGetP2PAttribute, (int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice),
      value, attrib, srcDevice, dstDevice)
WAITS(cuCoredumpGetAttribute, (CUcoredumpSettings attrib, void *value, size_t *size), attrib, value, size)
WAITS(cuCoredumpGetAttributeGlobal, (CUcoredumpSettings attrib, void *value, size_t *size), attrib, value, size)
WAITS(cuCoredumpSetAttribute, (CUcoredumpSettings attrib, void *value, size_t *size), attrib, value, size)
WAITS(cuCoredumpSetAttributeGlobal, (CUcoredumpSettings attrib, void *value, size_t *size), attrib, value, size)
WAITS(cuCtxGetApiVersion, (CUcontext ctx, unsigned int *version), ctx, version)
WAITS(cuCtxGetDevice_v2, (CUdevice * device, CUcontext ctx), device, ctx)
WAITS(cuCtxGetStreamPriorityRange, (int *leastPriority, int *greatestPriority), leastPriority, greatestPriority)
WAITS(cuCtxPopCurrent_v2, (CUcontext * pctx), pctx)
WAITS(cuCtxPushCurrent_v2, (CUcontext ctx), ctx)
WAITS(cuDeviceCanAccessPeer, (int *canAccessPeer, CUdevice dev, CUdevice peerDev), canAccessPeer, dev, peerDev)
WAITS(cuDeviceGetByPCIBusId, (CUdevice * dev, const char *pciBusId), dev, pciBusId)
WAITS(cuDeviceGetExecAffinitySupport, (int *pi, CUexecAffinityType type, CUdevice dev), pi, type, dev)
WAITS(cuDeviceGetHostAtomicCapabilities,
      (unsigned int *capabilities, const CUatomicOperation *operations, unsigned int count, CUdevice dev), capabilities,
      operations, count, dev)
WAITS(cuDeviceGetLuid, (char *luid, unsigned int *deviceNodeMask, CUdevice dev), luid, deviceNodeMask, dev)
WAITS(cuDeviceGetNvSciSyncAttributes, (void *nvSciSyncAttrList, CUdevice dev, int flags), nvSciSyncAttrList, dev, flags)
WAITS(cuDeviceGetP2PAtomicCapabilities,
      (unsigned int *capabilities, const CUatomicOperation *operations, unsigned int count, CUdevice srcDevice,
       CUdevice dstDevice),
      capabilities, operations, count, srcDevice, dstDevice)
WAITS(cuDeviceGetPCIBusId, (char *pciBusId, int len, CUdevice dev), pciBusId, len, dev)
WAITS(cuDeviceGetUuid, (CUuuid * uuid, CUdevice dev), uuid, dev)
WAITS(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice dev), uuid, dev)
WAITS(cuDevicePrimaryCtxGetState, (CUdevice dev, unsigned int *flags, int *active), dev, flags, active)
WAITS(cuDeviceRegisterAsyncNotification,
      (CUdevice device, CUasyncCallback callbackFunc, void *userData, CUasyncCallbackHandle *callback), device,
      callbackFunc, userData, callback)
WAITS(cuDeviceUnregisterAsyncNotification, (CUdevice device, CUasyncCallbackHandle callback), device, callback)
WAITS(cuProfilerInitialize, (const char *configFile, const char *outputFile, int outputMode), configFile, outputFile,
      outputMode)
VGPU_EXPORT CUresult cuProfilerStart(void)
{
    vgpu_away_call();
    return CALL(cuProfilerStart);
}
VGPU_EXPORT CUresult cuProfilerStop(void)
{
    vgpu_away_call();
    return CALL(cuProfilerStop);
}
