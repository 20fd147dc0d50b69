#include "session.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

const char *result_name(CUresult result)
{
    const char *name = NULL;
    return cu.cuGetErrorName(result, &name) == CUDA_SUCCESS && name != NULL ? name : "unknown";
}

int session_error(const char *call, CUresult result)
{
    printf("{\"state\": \"error\", \"call\": \"%s\", \"result\": \"%s\"", call, result_name(result));
    print_end();
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return STATUS_NO_MEMORY;
    return result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_ERROR_OPERATING_SYSTEM ? STATUS_NOT_PERMITTED
                                                                                       : STATUS_FAILED;
}

int session_open(int device)
{
    CUcontext context;
    CUdevice handle;
    CUresult result = cu.cuInit(0);
    if (result != CUDA_SUCCESS)
        return session_error("cuInit", result);
    result = cu.cuDeviceGet(&handle, device);
    if (result != CUDA_SUCCESS)
        return session_error("cuDeviceGet", result);
    result = cu.cuDevicePrimaryCtxRetain(&context, handle);
    if (result != CUDA_SUCCESS)
        return session_error("cuDevicePrimaryCtxRetain", result);
    result = cu.cuCtxSetCurrent(context);
    return result == CUDA_SUCCESS ? STATUS_OK : session_error("cuCtxSetCurrent", result);
}

/* Returns whether libvgpu is loaded. It searches the mapped files, so that a failed preload is noticed. */
static int libvgpu_loaded(void)
{
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && !found && fgets(line, sizeof(line), maps) != NULL)
        for (const char *c = line; *c != '\0' && !found; c++)
            found = __builtin_strncmp(c, "/libvgpu.so", 11) == 0;
    if (maps != NULL)
        fclose(maps);
    return found;
}

static void print_uuid(CUdevice device)
{
    CUuuid uuid;
    if (cu.cuDeviceGetUuid_v2(&uuid, device) != CUDA_SUCCESS)
        return;
    printf(", \"uuid\": \"");
    for (int i = 0; i < 16; i++)
        printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
    printf("\"");
}

void print_device(int device)
{
    CUdevice handle = device;
    char name[256] = "";
    size_t device_total = 0;
    size_t total = 0;
    size_t free_bytes = 0;
    cu.cuDeviceGet(&handle, device);
    cu.cuDeviceGetName(name, sizeof(name), handle);
    cu.cuDeviceTotalMem_v2(&device_total, handle);
    cu.cuMemGetInfo_v2(&free_bytes, &total);
    printf("\"pid\": %d, \"device\": %d, \"name\": \"%s\", \"device_total_bytes\": %zu, \"total_bytes\": %zu, "
           "\"free_bytes\": %zu, \"libvgpu\": %s",
           getpid(), device, name, device_total, total, free_bytes, libvgpu_loaded() ? "true" : "false");
    print_uuid(handle);
}

void print_end(void)
{
    puts("}");
    fflush(stdout);
}

void wait_as_asked(const struct options *options)
{
    if (options->wait_for_stdin) {
        char byte;
        while (read(STDIN_FILENO, &byte, 1) > 0)
            continue;
    } else if (options->seconds > 0) {
        struct timespec pause = {.tv_sec = (time_t)options->seconds};
        pause.tv_nsec = (long)((options->seconds - (double)pause.tv_sec) * 1e9);
        nanosleep(&pause, NULL);
    }
}
