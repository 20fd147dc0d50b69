/* wait_context.c: calls for contexts and devices:
 * they need nothing of libvgpu but to wait in front of the driver while the
 * lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuCtxGetFlags, (unsigned int *flags), flags)
WAITS(cuCtxSetFlags, (unsigned int flags), flags)
WAITS(cuCtxGetLimit, (size_t *pvalue, CUlimit limit), pvalue, limit)
WAITS(cuCtxGetCacheConfig, (CUfunc_cache *pconfig), pconfig)
WAITS(cuCtxSetCacheConfig, (CUfunc_cache config), config)
WAITS(cuCtxGetSharedMemConfig, (CUsharedconfig *pConfig), pConfig)
WAITS(cuCtxSetSharedMemConfig, (CUsharedconfig config), config)
VGPU_EXPORT CUresult cuCtxResetPersistingL2Cache(void)
{
    vgpu_away_call();
    return CALL(cuCtxResetPersistingL2Cache);
}
WAITS(cuCtxEnablePeerAccess, (CUcontext peerContext, unsigned int Flags), peerContext, Flags)
WAITS(cuCtxDisablePeerAccess, (CUcontext peerContext), peerContext)
WAITS(cuDeviceGetName, (char *name, int len, CUdevice dev), name, len, dev)
WAITS(cuDeviceGetP2PAttribute, (int* value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice),
      value, attrib, srcDevice, dstDevice)
