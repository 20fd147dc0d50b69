/* cuda_api.h: cuda.h with every version of every function declared under its true symbol name. */
#ifndef VGPU_CUDA_API_H
#define VGPU_CUDA_API_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

/* Declarations of cudaProfiler.h, a header that the toolkit no longer has. In it, outputMode is an enumeration. */
CUresult cuProfilerInitialize(const char *configFile, const char *outputFile, int outputMode);
CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);

/* None of NVIDIA's headers declares this function. */
nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *name);

#define VGPU_EXPORT __attribute__((visibility("default")))

#endif
