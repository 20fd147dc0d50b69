/* wait_texture.c: calls for arrays, textures and surfaces: they need nothing of libvgpu but to wait in front of the
 * driver while the lease is away (away.h, wait.h). */
#include "wait.h"

WAITS(cuArray3DGetDescriptor, (CUDA_ARRAY3D_DESCRIPTOR_v1 * pArrayDescriptor, CUarray hArray), pArrayDescriptor, hArray)
WAITS(cuArray3DGetDescriptor_v2, (CUDA_ARRAY3D_DESCRIPTOR * pArrayDescriptor, CUarray hArray), pArrayDescriptor, hArray)
WAITS(cuArrayGetDescriptor, (CUDA_ARRAY_DESCRIPTOR_v1 * pArrayDescriptor, CUarray hArray), pArrayDescriptor, hArray)
WAITS(cuArrayGetDescriptor_v2, (CUDA_ARRAY_DESCRIPTOR * pArrayDescriptor, CUarray hArray), pArrayDescriptor, hArray)
WAITS(cuArrayGetMemoryRequirements,
      (CUDA_ARRAY_MEMORY_REQUIREMENTS * memoryRequirements, CUarray array, CUdevice device), memoryRequirements, array,
      device)
WAITS(cuArrayGetPlane, (CUarray * pPlaneArray, CUarray hArray, unsigned int planeIdx), pPlaneArray, hArray, planeIdx)
WAITS(cuArrayGetSparseProperties, (CUDA_ARRAY_SPARSE_PROPERTIES * sparseProperties, CUarray array), sparseProperties,
      array)
WAITS(cuMipmappedArrayGetLevel, (CUarray * pLevelArray, CUmipmappedArray hMipmappedArray, unsigned int level),
      pLevelArray, hMipmappedArray, level)
WAITS(cuMipmappedArrayGetMemoryRequirements,
      (CUDA_ARRAY_MEMORY_REQUIREMENTS * memoryRequirements, CUmipmappedArray mipmap, CUdevice device),
      memoryRequirements, mipmap, device)
WAITS(cuMipmappedArrayGetSparseProperties, (CUDA_ARRAY_SPARSE_PROPERTIES * sparseProperties, CUmipmappedArray mipmap),
      sparseProperties, mipmap)
WAITS(cuSurfObjectGetResourceDesc, (CUDA_RESOURCE_DESC * pResDesc, CUsurfObject surfObject), pResDesc, surfObject)
WAITS(cuSurfRefGetArray, (CUarray * phArray, CUsurfref hSurfRef), phArray, hSurfRef)
WAITS(cuSurfRefSetArray, (CUsurfref hSurfRef, CUarray hArray, unsigned int Flags), hSurfRef, hArray, Flags)
WAITS(cuTexObjectGetResourceDesc, (CUDA_RESOURCE_DESC * pResDesc, CUtexObject texObject), pResDesc, texObject)
WAITS(cuTexObjectGetResourceViewDesc, (CUDA_RESOURCE_VIEW_DESC * pResViewDesc, CUtexObject texObject), pResViewDesc,
      texObject)
WAITS(cuTexObjectGetTextureDesc, (CUDA_TEXTURE_DESC * pTexDesc, CUtexObject texObject), pTexDesc, texObject)
WAITS(cuTexRefCreate, (CUtexref * pTexRef), pTexRef)
WAITS(cuTexRefDestroy, (CUtexref hTexRef), hTexRef)
WAITS(cuTexRefGetAddress, (CUdeviceptr_v1 * pdptr, CUtexref hTexRef), pdptr, hTexRef)
WAITS(cuTexRefGetAddressMode, (CUaddress_mode * pam, CUtexref hTexRef, int dim), pam, hTexRef, dim)
WAITS(cuTexRefGetAddress_v2, (CUdeviceptr * pdptr, CUtexref hTexRef), pdptr, hTexRef)
WAITS(cuTexRefGetArray, (CUarray * phArray, CUtexref hTexRef), phArray, hTexRef)
WAITS(cuTexRefGetBorderColor, (float *pBorderColor, CUtexref hTexRef), pBorderColor, hTexRef)
WAITS(cuTexRefGetFilterMode, (CUfilter_mode * pfm, CUtexref hTexRef), pfm, hTexRef)
WAITS(cuTexRefGetFlags, (unsigned int *pFlags, CUtexref hTexRef), pFlags, hTexRef)
WAITS(cuTexRefGetFormat, (CUarray_format * pFormat, int *pNumChannels, CUtexref hTexRef), pFormat, pNumChannels,
      hTexRef)
WAITS(cuTexRefGetMaxAnisotropy, (int *pmaxAniso, CUtexref hTexRef), pmaxAniso, hTexRef)
WAITS(cuTexRefGetMipmapFilterMode, (CUfilter_mode * pfm, CUtexref hTexRef), pfm, hTexRef)
WAITS(cuTexRefGetMipmapLevelBias, (float *pbias, CUtexref hTexRef), pbias, hTexRef)
WAITS(cuTexRefGetMipmapLevelClamp, (float *pminMipmapLevelClamp, float *pmaxMipmapLevelClamp, CUtexref hTexRef),
      pminMipmapLevelClamp, pmaxMipmapLevelClamp, hTexRef)
WAITS(cuTexRefGetMipmappedArray, (CUmipmappedArray * phMipmappedArray, CUtexref hTexRef), phMipmappedArray, hTexRef)
WAITS(cuTexRefSetAddress, (unsigned int *ByteOffset, CUtexref hTexRef, CUdeviceptr_v1 dptr, unsigned int bytes),
      ByteOffset, hTexRef, dptr, bytes)
WAITS(cuTexRefSetAddress2D,
      (CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR_v1 *desc, CUdeviceptr_v1 dptr, unsigned int Pitch), hTexRef, desc,
      dptr, Pitch)
WAITS(cuTexRefSetAddress2D_v2, (CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch),
      hTexRef, desc, dptr, Pitch)
WAITS(cuTexRefSetAddress2D_v3, (CUtexref hTexRef, const CUDA_ARRAY_DESCRIPTOR *desc, CUdeviceptr dptr, size_t Pitch),
      hTexRef, desc, dptr, Pitch)
WAITS(cuTexRefSetAddressMode, (CUtexref hTexRef, int dim, CUaddress_mode am), hTexRef, dim, am)
WAITS(cuTexRefSetAddress_v2, (size_t *ByteOffset, CUtexref hTexRef, CUdeviceptr dptr, size_t bytes), ByteOffset,
      hTexRef, dptr, bytes)
WAITS(cuTexRefSetArray, (CUtexref hTexRef, CUarray hArray, unsigned int Flags), hTexRef, hArray, Flags)
WAITS(cuTexRefSetBorderColor, (CUtexref hTexRef, float *pBorderColor), hTexRef, pBorderColor)
WAITS(cuTexRefSetFilterMode, (CUtexref hTexRef, CUfilter_mode fm), hTexRef, fm)
WAITS(cuTexRefSetFlags, (CUtexref hTexRef, unsigned int Flags), hTexRef, Flags)
WAITS(cuTexRefSetFormat, (CUtexref hTexRef, CUarray_format fmt, int NumPackedComponents), hTexRef, fmt,
      NumPackedComponents)
WAITS(cuTexRefSetMaxAnisotropy, (CUtexref hTexRef, unsigned int maxAniso), hTexRef, maxAniso)
WAITS(cuTexRefSetMipmapFilterMode, (CUtexref hTexRef, CUfilter_mode fm), hTexRef, fm)
WAITS(cuTexRefSetMipmapLevelBias, (CUtexref hTexRef, float bias), hTexRef, bias)
WAITS(cuTexRefSetMipmapLevelClamp, (CUtexref hTexRef, float minMipmapLevelClamp, float maxMipmapLevelClamp), hTexRef,
      minMipmapLevelClamp, maxMipmapLevelClamp)
WAITS(cuTexRefSetMipmappedArray, (CUtexref hTexRef, CUmipmappedArray hMipmappedArray, unsigned int Flags), hTexRef,
      hMipmappedArray, Flags)
