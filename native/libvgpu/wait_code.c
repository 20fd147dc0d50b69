/* wait_code.c: calls for functions, kernels, occupancy and executable graphs:
 * they need nothing of libvgpu but to wait in front of the driver while the
 * lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuFuncSetAttribute, (CUfunction hfunc, CUfunction_attribute attrib, int value), hfunc, attrib, value)
WAITS(cuFuncSetCacheConfig, (CUfunction hfunc, CUfunc_cache config), hfunc, config)
WAITS(cuFuncSetSharedMemConfig, (CUfunction hfunc, CUsharedconfig config), hfunc, config)
WAITS(cuFuncLoad, (CUfunction function), function)
WAITS(cuKernelSetAttribute, (CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev), attrib, val, kernel,
      dev)
WAITS(cuKernelSetCacheConfig, (CUkernel kernel, CUfunc_cache config, CUdevice dev), kernel, config, dev)
WAITS(cuModuleGetGlobal_v2, (CUdeviceptr * dptr, size_t *bytes, CUmodule hmod, const char *name), dptr, bytes, hmod,
      name)
WAITS(cuLibraryGetGlobal, (CUdeviceptr * dptr, size_t *bytes, CUlibrary library, const char *name), dptr, bytes,
      library, name)
WAITS(cuLibraryGetManaged, (CUdeviceptr * dptr, size_t *bytes, CUlibrary library, const char *name), dptr, bytes,
      library, name)
WAITS(cuLibraryGetModule, (CUmodule * pMod, CUlibrary library), pMod, library)
WAITS(cuLibraryGetUnifiedFunction, (void **fptr, CUlibrary library, const char *symbol), fptr, library, symbol)
WAITS(cuOccupancyMaxActiveBlocksPerMultiprocessor,
      (int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize), numBlocks, func, blockSize,
      dynamicSMemSize)
WAITS(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
      (int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize, unsigned int flags), numBlocks, func,
      blockSize, dynamicSMemSize, flags)
WAITS(cuOccupancyMaxPotentialBlockSize,
      (int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize blockSizeToDynamicSMemSize,
       size_t dynamicSMemSize, int blockSizeLimit),
      minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit)
WAITS(cuOccupancyMaxPotentialBlockSizeWithFlags,
      (int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize blockSizeToDynamicSMemSize,
       size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags),
      minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit, flags)
WAITS(cuOccupancyAvailableDynamicSMemPerBlock, (size_t *dynamicSmemSize, CUfunction func, int numBlocks, int blockSize),
      dynamicSmemSize, func, numBlocks, blockSize)
WAITS(cuOccupancyMaxPotentialClusterSize, (int *clusterSize, CUfunction func, const CUlaunchConfig *config),
      clusterSize, func, config)
WAITS(cuOccupancyMaxActiveClusters, (int *numClusters, CUfunction func, const CUlaunchConfig *config), numClusters,
      func, config)
WAITS(cuGraphExecUpdate_v2, (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo),
      hGraphExec, hGraph, resultInfo)
WAITS(cuGraphExecKernelNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuGraphExecKernelNodeSetParams_v2,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuGraphExecMemcpyNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx), hGraphExec, hNode,
      copyParams, ctx)
WAITS(cuGraphExecMemsetNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx),
      hGraphExec, hNode, memsetParams, ctx)
WAITS(cuGraphExecHostNodeSetParams,
      (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams), hGraphExec, hNode,
      nodeParams)
WAITS(cuGraphExecNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams), hGraphExec,
      hNode, nodeParams)
WAITS(cuGraphNodeSetEnabled, (CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled), hGraphExec, hNode,
      isEnabled)
WAITS(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction hfunc), pi, attrib, hfunc)
WAITS(cuFuncGetModule, (CUmodule * hmod, CUfunction hfunc), hmod, hfunc)
WAITS(cuKernelGetAttribute, (int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev), pi, attrib, kernel,
      dev)
WAITS(cuLinkAddData,
      (CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int numOptions,
       CUjit_option *options, void **optionValues),
      state, type, data, size, name, numOptions, options, optionValues)
WAITS(cuLinkAddData_v2,
      (CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int numOptions,
       CUjit_option *options, void **optionValues),
      state, type, data, size, name, numOptions, options, optionValues)
WAITS(cuLinkAddFile,
      (CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions, CUjit_option *options,
       void **optionValues),
      state, type, path, numOptions, options, optionValues)
WAITS(cuLinkAddFile_v2,
      (CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions, CUjit_option *options,
       void **optionValues),
      state, type, path, numOptions, options, optionValues)
WAITS(cuLinkComplete, (CUlinkState state, void **cubinOut, size_t *sizeOut), state, cubinOut, sizeOut)
WAITS(cuLinkCreate, (unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut),
      numOptions, options, optionValues, stateOut)
WAITS(cuLinkCreate_v2, (unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut),
      numOptions, options, optionValues, stateOut)
WAITS(cuLinkDestroy, (CUlinkState state), state)
WAITS(cuModuleGetSurfRef, (CUsurfref * pSurfRef, CUmodule hmod, const char *name), pSurfRef, hmod, name)
WAITS(cuModuleGetTexRef, (CUtexref * pTexRef, CUmodule hmod, const char *name), pTexRef, hmod, name)
