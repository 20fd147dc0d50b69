/*
 * The channels of CUDA contexts. The simulator makes and frees them as NVIDIA's libcuda does: by ioctl on the control
 * device, through the process's own symbol `ioctl`, so that a library loaded before the C library sees each call. On an
 * H100 with driver 580.159.04, a context has one group of eight channels, made one by one with a compute object each,
 * and three groups of four channels for copies. Each group is scheduled when all of its channels are made. The clients
 * of an MPS server have no channels of their own; they use the server's.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../common/rm.h"
#include "internal.h"

enum { FIRST_HANDLE = 0x5c000000, CLIENT = 0x41, CHANNEL = 0xc86f, COMPUTE = 0xcbc0 };
#define CHANNEL_FAULT "FIFO_CHANNEL" /* name of a fault that delays a context after each of its channels */
enum { COMPUTE_CHANNELS = 8, COPY_CHANNELS = 4 };

typedef int ioctl_function(int, unsigned long, ...);

/*
 * Acts as the kernel for calls on the control device. The function is exported for callers whose `ioctl` the dynamic
 * linker binds to this library.
 */
CU_EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (_IOC_TYPE(request) == RM_IOCTL_TYPE && sim_rm_is(cu.s, fd))
        return sim_rm_ioctl(cu.s, fd, request, argument);
    return (int)syscall(SYS_ioctl, fd, request, argument);
}

/*
 * Calls the program's ioctl, because this library's symbols bind to the program's first. The C library's ioctl does not
 * know the simulated device.
 */
static int call(unsigned long request, void *argument)
{
    static ioctl_function *seen;
    if (seen == NULL)
        seen = (ioctl_function *)dlsym(dlopen(NULL, RTLD_NOW), "ioctl");
    int result = seen == NULL ? -1 : seen(cu.rm_file, request, argument);
    return result != 0 && (seen == NULL || errno == ENOTTY) ? ioctl(cu.rm_file, request, argument) : result;
}

static uint32_t make(uint32_t class_id, uint32_t parent, uint32_t handle, const uint32_t *parameters)
{
    struct rm_alloc a = {.client = cu.rm_client,
                         .parent = parent,
                         .object = handle,
                         .class_id = class_id,
                         .parameters = (uintptr_t)parameters};
    int result = call(RM_REQUEST(RM_ESCAPE_ALLOC, struct rm_alloc), &a);
    return result == 0 && a.status == RM_OK ? a.object : 0;
}

static uint32_t make_next(uint32_t class_id, uint32_t parent, const uint32_t *parameters)
{
    return make(class_id, parent, FIRST_HANDLE + ++cu.rm_handles, parameters);
}

static void end(uint32_t parent, uint32_t handle)
{
    struct rm_free f = {.client = cu.rm_client, .parent = parent, .object = handle};
    if (handle != 0)
        call(RM_REQUEST(RM_ESCAPE_FREE, struct rm_free), &f);
}

static bool make_client(void)
{
    if (cu.rm_client != 0)
        return true;
    if (cu.rm_file < 0)
        cu.rm_file = sim_rm_open(cu.s, cu.proc);
    if (cu.rm_file >= 0)
        cu.rm_client = make(CLIENT, 0, 0, NULL);
    return cu.rm_client != 0;
}

static bool make_device(struct cu_device *d)
{
    if (d->rm_subdevice != 0)
        return true;
    uint32_t parameters[2] = {d->card, (uint32_t)(d->use - cu.proc->uses)};
    if (d->rm_device == 0)
        d->rm_device = make_next(RM_CLASS_DEVICE, cu.rm_client, parameters);
    if (d->rm_device != 0)
        d->rm_subdevice = make_next(RM_CLASS_SUBDEVICE, d->rm_device, (uint32_t[]){0});
    return d->rm_subdevice != 0;
}

static bool schedule(uint32_t group)
{
    struct rm_schedule on = {.enable = 1};
    struct rm_control c = {.client = cu.rm_client,
                           .object = group,
                           .command = RM_SCHEDULE_GROUP,
                           .parameters = (uintptr_t)&on,
                           .parameters_size = sizeof(on)};
    return call(RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &c) == 0 && c.status == RM_OK;
}

/* Makes a channel group and returns its handle; returns 0 if no more channels are available. */
static uint32_t make_group(const struct cu_device *d, int channels, bool computes)
{
    uint32_t group = make_next(RM_CLASS_CHANNEL_GROUP, d->rm_device, NULL);
    bool whole = group != 0;
    for (int i = 0; whole && i < channels; i++) {
        uint32_t channel = make_next(CHANNEL, group, NULL);
        whole = channel != 0 && (!computes || make_next(COMPUTE, channel, NULL) != 0);
        sim_fault(cu.s, CHANNEL_FAULT, (int)d->card);
    }
    whole = whole && schedule(group);
    if (!whole)
        end(d->rm_device, group);
    return whole ? group : 0;
}

CUresult cu_channels_make(CUcontext ctx)
{
    struct cu_device *d = cu_device_of(ctx);
    if (cu.mps)
        return CUDA_SUCCESS;
    CU_CHECK(make_client() && make_device(d), CUDA_ERROR_OPERATING_SYSTEM);
    for (int i = 0; i < CU_CHANNEL_GROUPS; i++) {
        ctx->groups[i] = make_group(d, i == 0 ? COMPUTE_CHANNELS : COPY_CHANNELS, i == 0);
        if (ctx->groups[i] == 0) {
            cu_channels_end(ctx);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return CUDA_SUCCESS;
}

void cu_channels_end(CUcontext ctx)
{
    for (int i = 0; i < CU_CHANNEL_GROUPS; i++) {
        end(cu_device_of(ctx)->rm_device, ctx->groups[i]);
        ctx->groups[i] = 0;
    }
}
