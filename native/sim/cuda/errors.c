/* Names and descriptions of CUDA errors. */
#include "internal.h"

#define ERRORS(E)                                                                                                     \
    E(CUDA_SUCCESS, "no error")                                                                                       \
    E(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                                   \
    E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                                      \
    E(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                                             \
    E(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                                               \
    E(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                                                       \
    E(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable")                             \
    E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                                     \
    E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                                            \
    E(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                                                     \
    E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                                           \
    E(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")                                                       \
    E(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed")                                                   \
    E(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")                                                           \
    E(CUDA_ERROR_NOT_MAPPED, "resource not mapped")                                                                   \
    E(CUDA_ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture")                                    \
    E(CUDA_ERROR_CONTEXT_ALREADY_IN_USE, "exclusive-thread device already in use by a different thread")              \
    E(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices")                   \
    E(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed")                                                         \
    E(CUDA_ERROR_FILE_NOT_FOUND, "file not found")                                                                    \
    E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                                           \
    E(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                                                 \
    E(CUDA_ERROR_NOT_READY, "device not ready")                                                                       \
    E(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                                         \
    E(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")                                  \
    E(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")                                           \
    E(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled")                                       \
    E(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled")                                         \
    E(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process")                         \
    E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                                        \
    E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped")       \
    E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region")             \
    E(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                                         \
    E(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch")                               \
    E(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                                            \
    E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                                            \
    E(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                                                      \
    E(CUDA_ERROR_MPS_CONNECTION_FAILED, "MPS client failed to connect to the MPS control daemon or the MPS server")   \
    E(CUDA_ERROR_MPS_RPC_FAILURE, "the remote procedural call between the MPS server and the MPS client failed")      \
    E(CUDA_ERROR_MPS_SERVER_NOT_READY, "MPS server is not ready to accept new MPS client requests")                   \
    E(CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, "the hardware resources required to create MPS client have been exhausted") \
    E(CUDA_ERROR_MPS_CLIENT_TERMINATED, "the MPS client has been terminated by the server")                           \
    E(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")                      \
    E(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration")                                    \
    E(CUDA_ERROR_UNKNOWN, "unknown error")

struct error {
    CUresult code;
    const char *name, *text;
};
#define ENTRY(code, text) {code, #code, text},
static const struct error errors[] = {ERRORS(ENTRY)};

static const struct error *find(CUresult code)
{
    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == code)
            return &errors[i];
    return NULL;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    CU_CHECK(name != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct error *e = find(error);
    *name = e == NULL ? NULL : e->name;
    return e == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    CU_CHECK(text != NULL, CUDA_ERROR_INVALID_VALUE);
    const struct error *e = find(error);
    *text = e == NULL ? NULL : e->text;
    return e == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
