/*
 * vgpu-engine-probe UUID: can the arbiter preempt a tenant on this device in the middle of a kernel?
 *
 * The program runs a kernel of many steps. Another process of it disables and enables the kernel's channels, and for
 * each call copies the open control file as the arbiter does. The device can be preempted if the disabled kernel makes
 * no progress for far longer than it needs, while copies continue, and the enabled kernel ends with the result of an
 * undisturbed one. The output is one JSON line: {"engine": "cut" or "gate", "why": ..., "off_us", "on_us",
 * "context_mib": what a context takes on the device, by NVML; 0: not known}. Exit status: 0 if there is an answer, 1 if
 * the driver does not let the program work at all, 2 for wrong arguments. SIGALRM ends the program after 30 s.
 */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <nvml.h>

#include "../common/rm.h"
#include "check.h"

enum {
    OBJECTS = 256,
    STEPS = 12000,
    TIMES_LONGER = 3,
    ATTEMPTS = 50,
    SECONDS_AT_MOST = 30,
    AFTER_MIN_NS = 1000000,
    PROCESSES = 1024
};

/*
 * A kernel of many steps, each some 2.5 us on a card of 1.5 GHz, 30 ms in all. A simulated card only takes the time in
 * the text's first comment.
 */
static const char ptx[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n// vgpu-sim-microseconds=30000\n"
    ".visible .entry count(.param .u64 steps, .param .u64 counter)\n{\n"
    " .reg .pred %p;\n .reg .u64 %n, %c, %i;\n .reg .f32 %f;\n .reg .u32 %k;\n"
    " ld.param.u64 %n, [steps];\n ld.param.u64 %c, [counter];\n mov.u64 %i, 0;\n mov.f32 %f, 0f3F800000;\n"
    "step:\n mov.u32 %k, 1000;\n"
    "again:\n fma.rn.f32 %f, %f, 0f3F7FFFFF, 0f33D6BF95;\n sub.u32 %k, %k, 1;\n setp.ne.u32 %p, %k, 0;\n @%p bra again;\n"
    " add.u64 %i, %i, 1;\n st.volatile.global.u64 [%c], %i;\n setp.lt.u64 %p, %i, %n;\n @%p bra step;\n"
    " st.volatile.global.f32 [%c+8], %f;\n ret;\n}\n";

struct driver {
#define SYMBOL(name) __typeof__(&name) name;
#include "engine_symbols.def"
#undef SYMBOL
};
static struct driver cu;
#define DO(call) check(cu.call, #call)

/* The channels that this process's libcuda made, collected from its ioctl calls. Only one thread uses it. */
static struct {
    int file;
    uint32_t client, subdevice, count;
    struct object {
        uint32_t handle, parent, class_id;
    } objects[OBJECTS];
} seen;

static void note(int fd, const struct rm_alloc *a)
{
    if (a->class_id == RM_CLASS_CHANNEL_GROUP || a->class_id == RM_CLASS_SUBDEVICE ||
        (a->class_id & 0xff) == RM_CLASS_CHANNEL_LOW || (a->class_id & 0xff) == RM_CLASS_COMPUTE_LOW)
        if (seen.count < OBJECTS)
            seen.objects[seen.count++] = (struct object){a->object, a->parent, a->class_id};
    if ((a->class_id & 0xff) == RM_CLASS_COMPUTE_LOW) {
        seen.file = fd;
        seen.client = a->client;
    }
}

__attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...)
{
    static int (*next)(int, unsigned long, ...);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (next == NULL)
        next = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
    int result = next(fd, request, argument);
    if (result != 0 || _IOC_TYPE(request) != RM_IOCTL_TYPE || _IOC_NR(request) != RM_ESCAPE_ALLOC)
        return result;
    struct rm_alloc a = {.status = ~0u};
    if (_IOC_SIZE(request) == sizeof(struct rm_alloc)) {
        memcpy(&a, argument, sizeof(a));
    } else if (_IOC_SIZE(request) == sizeof(struct rm_alloc_short)) {
        memcpy(&a, argument, offsetof(struct rm_alloc_short, parameters_size));
        a.status = ((const struct rm_alloc_short *)argument)->status;
    }
    if (a.status == RM_OK)
        note(fd, &a);
    return result;
}

static const struct object *find(uint32_t handle)
{
    for (uint32_t i = 0; i < seen.count; i++)
        if (seen.objects[i].handle == handle)
            return &seen.objects[i];
    return NULL;
}

/* Returns whether a channel of the group has a compute object. */
static bool computes(const struct object *group)
{
    for (uint32_t i = 0; group != NULL && i < seen.count; i++) {
        const struct object *o = &seen.objects[i];
        const struct object *channel = (o->class_id & 0xff) == RM_CLASS_COMPUTE_LOW ? find(o->parent) : NULL;
        if (channel != NULL && channel->parent == group->handle)
            return true;
    }
    return false;
}

static uint32_t subdevice_below(uint32_t device)
{
    for (uint32_t i = 0; i < seen.count; i++)
        if (seen.objects[i].class_id == RM_CLASS_SUBDEVICE && seen.objects[i].parent == device)
            return seen.objects[i].handle;
    return 0;
}

/*
 * Fills in the channels of the groups with a compute object, each once, because the driver counts how often a channel
 * is disabled. Sets their subdevice. A count of 0 means that there are none.
 */
static void name_channels(struct rm_disable_channels *call)
{
    for (uint32_t i = 0; i < seen.count && call->count < RM_DISABLE_CHANNELS_MAX; i++) {
        const struct object *o = &seen.objects[i];
        const struct object *group = (o->class_id & 0xff) == RM_CLASS_CHANNEL_LOW ? find(o->parent) : NULL;
        if (!computes(group))
            continue;
        seen.subdevice = subdevice_below(group->parent);
        call->clients[call->count] = seen.client;
        call->channels[call->count++] = o->handle;
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

struct order {
    int file;
    uint32_t client, subdevice;
    struct rm_disable_channels call;
};

struct answer {
    int error; /* errno of the call, or 0 */
    uint32_t status;
    uint64_t took_ns; /* duration of the ioctl alone */
};

/*
 * The body of the child process, which does the arbiter's part: for each order it copies the control file, makes the
 * call, and closes the copy.
 */
static void serve(int link, pid_t tenant)
{
    struct order order;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (read(link, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
        struct answer answer = {.status = ~0u};
        int pidfd = (int)syscall(SYS_pidfd_open, tenant, 0);
        int file = pidfd < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, order.file, 0);
        struct rm_control c = {.client = order.client,
                               .object = order.subdevice,
                               .command = RM_DISABLE_CHANNELS,
                               .parameters = (uintptr_t)&order.call,
                               .parameters_size = sizeof(order.call),
                               .status = ~0u};
        uint64_t begin = now_ns();
        if (file < 0 || ioctl(file, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &c) != 0)
            answer.error = errno;
        answer.took_ns = now_ns() - begin;
        answer.status = c.status;
        if (file >= 0)
            close(file);
        if (pidfd >= 0)
            close(pidfd);
        if (write(link, &answer, sizeof(answer)) != (ssize_t)sizeof(answer))
            break;
    }
    _exit(0);
}

static int g_link;
static double off_us, on_us;
static char why[256];

static bool say(const char *reason)
{
    snprintf(why, sizeof(why), "%s", reason);
    return false;
}

static bool turn(struct order *order, bool off)
{
    struct answer answer = {.error = EPIPE};
    order->call.disable = off;
    if (write(g_link, order, sizeof(*order)) != (ssize_t)sizeof(*order) ||
        read(g_link, &answer, sizeof(answer)) != (ssize_t)sizeof(answer))
        return say("the process that makes the calls ended");
    *(off ? &off_us : &on_us) = (double)answer.took_ns / 1e3;
    if (answer.error == 0 && answer.status == RM_OK)
        return true;
    snprintf(why, sizeof(why), "the driver refuses to %s channels: %s %#x", off ? "stop" : "start",
             answer.error != 0 ? "errno" : "status", answer.error != 0 ? (unsigned)answer.error : answer.status);
    return false;
}

static struct {
    CUfunction kernel;
    CUdeviceptr counter;
    CUstream stream, copies;
} run;

struct result {
    uint64_t steps;
    uint32_t value[2];
};

static void launch(void)
{
    uint64_t steps = STEPS;
    void *parameters[] = {&steps, &run.counter};
    DO(cuMemsetD8_v2(run.counter, 0, sizeof(struct result)));
    DO(cuCtxSynchronize());
    DO(cuLaunchKernel(run.kernel, 1, 1, 1, 1, 1, 1, 0, run.stream, parameters, NULL));
}

static struct result look(void)
{
    static struct result *out;
    if (out == NULL)
        DO(cuMemHostAlloc((void **)&out, sizeof(*out), 0));
    DO(cuMemcpyDtoHAsync_v2(out, run.counter, sizeof(*out), run.copies));
    DO(cuStreamSynchronize(run.copies));
    return *out;
}

static bool same(struct result a, struct result b)
{
    return memcmp(&a, &b, sizeof(a)) == 0;
}

enum outcome { PROVED, DISPROVED, OVER };

/*
 * Runs one kernel whose channels are disabled after `after_ns`. OVER: this process had no processor for so long that
 * the kernel ended before its channels were disabled, so the attempt proves nothing.
 */
static enum outcome attempt(struct order *order, uint64_t after_ns, uint64_t alone_ns, struct result whole)
{
    launch();
    sleep_ns(after_ns);
    if (cu.cuStreamQuery(run.stream) != CUDA_ERROR_NOT_READY)
        return OVER;
    if (!turn(order, true))
        return DISPROVED;
    struct result first = look();
    bool over = cu.cuStreamQuery(run.stream) != CUDA_ERROR_NOT_READY;
    if (!over)
        sleep_ns(alone_ns * TIMES_LONGER);
    struct result second = look();
    bool stands = cu.cuStreamQuery(run.stream) == CUDA_ERROR_NOT_READY && same(first, second);
    if (!turn(order, false))
        return DISPROVED;
    DO(cuStreamSynchronize(run.stream));
    if (over)
        return OVER;
    if (!stands)
        say("the driver says that the channels are stopped, and the kernel goes on");
    else if (!same(look(), whole))
        say("a kernel that was stopped does not end with the result of one that was not");
    else
        say("a kernel stopped from outside stood still, went on and ended whole");
    return stands && same(look(), whole) ? PROVED : DISPROVED;
}

static bool prove(void)
{
    struct order order = {.call = {.count = 0}};
    name_channels(&order.call);
    order.file = seen.file;
    order.client = seen.client;
    order.subdevice = seen.subdevice;
    if (order.call.count == 0 || order.subdevice == 0)
        return say("the process has no channels of its own");
    launch(); /* a first launch loads everything that is loaded lazily */
    DO(cuStreamSynchronize(run.stream));
    uint64_t begin = now_ns();
    launch();
    DO(cuStreamSynchronize(run.stream));
    uint64_t alone_ns = now_ns() - begin;
    struct result whole = look();
    /*
     * On a busy machine alone_ns may be many times the kernel's duration, so each attempt disables the channels
     * earlier.
     */
    uint64_t after_ns = alone_ns / 4;
    enum outcome outcome = OVER;
    for (int i = 0; i < ATTEMPTS && outcome == OVER; i++) {
        outcome = attempt(&order, after_ns, alone_ns, whole);
        after_ns = after_ns / 2 > AFTER_MIN_NS ? after_ns / 2 : AFTER_MIN_NS;
    }
    return outcome == OVER ? say("the kernel was over before it could be stopped") : outcome == PROVED;
}

/*
 * Returns the memory of this process on the device, by NVML, in MiB; 0 if it is not known, as in a separate pid
 * namespace.
 */
static unsigned long long held_mib(const char *uuid)
{
    static nvmlProcessInfo_t processes[PROCESSES];
    unsigned count = PROCESSES;
    nvmlDevice_t device;
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (nvml == NULL)
        return 0;
    __typeof__(&nvmlInit_v2) init;
    __typeof__(&nvmlDeviceGetHandleByUUID) find_device;
    __typeof__(&nvmlDeviceGetComputeRunningProcesses_v3) list;
    *(void **)&init = dlsym(nvml, "nvmlInit_v2");
    *(void **)&find_device = dlsym(nvml, "nvmlDeviceGetHandleByUUID");
    *(void **)&list = dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    if (init == NULL || find_device == NULL || list == NULL || init() != NVML_SUCCESS ||
        find_device(uuid, &device) != NVML_SUCCESS || list(device, &count, processes) != NVML_SUCCESS)
        return 0;
    for (unsigned i = 0; i < count; i++)
        if (processes[i].pid == (unsigned)getpid() &&
            processes[i].usedGpuMemory != (unsigned long long)NVML_VALUE_NOT_AVAILABLE)
            return (processes[i].usedGpuMemory + (1u << 20) - 1) >> 20;
    return 0;
}

static unsigned long long context_mib;

static void open_device(const char *uuid)
{
    CUcontext context;
    CUmodule module;
    DO(cuInit(0));
    DO(cuDevicePrimaryCtxRetain(&context, 0));
    context_mib = held_mib(uuid);
    DO(cuCtxSetCurrent(context));
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&run.kernel, module, "count"));
    DO(cuMemAlloc_v2(&run.counter, sizeof(struct result)));
    DO(cuStreamCreate(&run.stream, CU_STREAM_NON_BLOCKING));
    DO(cuStreamCreate(&run.copies, CU_STREAM_NON_BLOCKING));
}

static bool load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    bool complete = handle != NULL;
#define SYMBOL(name) complete = complete && (*(void **)&cu.name = dlsym(handle, #name)) != NULL;
#include "engine_symbols.def"
#undef SYMBOL
    return complete;
}

int main(int argc, char **argv)
{
    int link[2];
    if (argc != 2) {
        fputs("usage: vgpu-engine-probe UUID\n", stderr);
        return 2;
    }
    alarm(SECONDS_AT_MOST); /* the signal ends a driver call that never returns; the probe then has no answer */
    setenv("CUDA_VISIBLE_DEVICES", argv[1], 1);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) != 0)
        return 1;
    pid_t tenant = getpid(), child = fork();
    if (child == 0) {
        close(link[0]);
        serve(link[1], tenant);
    }
    close(link[1]);
    g_link = link[0];
    if (child < 0 || !load()) {
        fprintf(stderr, "vgpu-engine-probe: %s\n", child < 0 ? strerror(errno) : dlerror());
        return 1;
    }
    open_device(argv[1]);
    bool cut = prove();
    printf("{\"engine\": \"%s\", \"why\": \"%s\", \"off_us\": %.1f, \"on_us\": %.1f, \"context_mib\": %llu}\n",
           cut ? "cut" : "gate", why, off_us, on_us, context_mib);
    return 0;
}
