/*
 * strangers.c: ordinary programs. Each way runs with libvgpu preloaded, under a memory limit of 2 GiB.
 *
 *   strangers WAY [ARGUMENT...]
 *     forks        a server without CUDA forks 24 workers one after the other; each allocates, launches and ends
 *     reload       dlopen, a call, dlclose of libcuda, 100 times
 *     tiny-stacks  a thread of the smallest stack makes each first call, and the calls that follow
 *     vfork        a process with CUDA starts itself by vfork and exec
 *     closefrom [FOLDER]  closes all descriptors before the first call, and before each of the calls that follow;
 *                  with a folder, those of its files (a real driver works only with its own descriptors)
 *     exit         calls CUDA from a function of atexit and from a thread's destructor
 *     deny CALL E  works where a filter answers that system call by the error E
 *     limits N     allocates with RLIMIT_NOFILE lowered to N after the driver's first call
 *     graphs       launches a graph with memory nodes until its standard input ends
 *     cancelled    cancels 20 threads that allocate and launch, and works
 *     orphans      launches before cuInit, and in a forked child
 *     ranks        two processes share one buffer by a file descriptor and launch, until standard input ends
 *     work         allocates past the limit, is refused, launches, and frees
 * Exit status 0 if 3 GiB were refused and all else was as without limits, or a message.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

/* clang-format off */
#define SYMBOLS(X)                     \
    X(cuInit)                          \
    X(cuDeviceGet)                     \
    X(cuDevicePrimaryCtxRetain)        \
    X(cuCtxSetCurrent)                 \
    X(cuCtxSynchronize)                \
    X(cuModuleLoadData)                \
    X(cuModuleGetFunction)             \
    X(cuLaunchKernel)                  \
    X(cuMemAlloc_v2)                   \
    X(cuMemFree_v2)                    \
    X(cuMemGetInfo_v2)                 \
    X(cuMemCreate)                     \
    X(cuMemRelease)                    \
    X(cuMemExportToShareableHandle)    \
    X(cuMemImportFromShareableHandle)  \
    X(cuStreamCreate)                  \
    X(cuStreamDestroy_v2)              \
    X(cuStreamSynchronize)             \
    X(cuStreamBeginCapture_v2)         \
    X(cuStreamEndCapture)              \
    X(cuGraphInstantiateWithFlags)     \
    X(cuGraphLaunch)                   \
    X(cuGraphExecDestroy)              \
    X(cuGraphDestroy)                  \
    X(cuMemAllocAsync)                 \
    X(cuMemFreeAsync)
/* clang-format on */

static struct {
#define MEMBER(name) __typeof__(&name) name;
    SYMBOLS(MEMBER)
} cu;

static const char ptx[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry one()\n{\n ret;\n}\n";
static const size_t PIECE = 64u << 20, TOO_MUCH = 3ul << 30;
static FILE *out;
static CUcontext shared_context;
static CUfunction function;

static void fail(const char *what, long figure)
{
    fprintf(out, "strangers: %s: %ld\n", what, figure);
    fflush(out);
    _exit(1);
}

static void check(long result, const char *what)
{
    if (result != 0)
        fail(what, result);
}
#define DO(call) check((long)cu.call, #call)
#define NEED(what)          \
    do {                    \
        if (!(what))        \
            fail(#what, 0); \
    } while (0)

static void *load(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    NEED(handle != NULL);
#define FIND(name) NEED((*(void **)&cu.name = dlsym(handle, #name)) != NULL);
    SYMBOLS(FIND)
    return handle;
}

static void begin(void)
{
    CUdevice device;
    CUmodule module;
    DO(cuInit(0));
    DO(cuDeviceGet(&device, 0));
    DO(cuDevicePrimaryCtxRetain(&shared_context, device));
    DO(cuCtxSetCurrent(shared_context));
    DO(cuModuleLoadData(&module, ptx));
    DO(cuModuleGetFunction(&function, module, "one"));
}

static void launch(void)
{
    DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
}

/* One allocation, one above the limit, a launch, a free. */
static void work(void)
{
    CUdeviceptr pointer;
    CUdeviceptr more;
    DO(cuMemAlloc_v2(&pointer, PIECE));
    NEED(cu.cuMemAlloc_v2(&more, TOO_MUCH) == CUDA_ERROR_OUT_OF_MEMORY);
    launch();
    DO(cuCtxSynchronize());
    DO(cuMemFree_v2(pointer));
}

static void begin_and_work(void)
{
    begin();
    work();
}

static void wait_for(pid_t child, const char *what)
{
    int status;
    NEED(child > 0 && waitpid(child, &status, 0) == child);
    check(status, what);
}

/*
 * The children start at intervals. While a context is made it counts twice, so three that start at the same time
 * would not fit.
 */
static void try_forks(char **unused)
{
    (void)unused;
    for (unsigned i = 0; i < 24; i++) {
        pid_t worker = fork();
        if (worker == 0) {
            begin_and_work();
            _exit(0);
        }
        wait_for(worker, "a worker's status");
    }
}

static void try_reload(void **handle)
{
    for (int i = 0; i < 100; i++) {
        begin_and_work();
        check(dlclose(*handle), "dlclose");
        *handle = load();
    }
}

static void *in_thread(void *first)
{
    if (first != NULL)
        begin();
    DO(cuCtxSetCurrent(shared_context));
    work();
    return NULL;
}

static void try_tiny_stacks(char **unused)
{
    pthread_attr_t attributes;
    pthread_t thread;
    (void)unused;
    pthread_attr_init(&attributes);
    for (int i = 0; i < 8; i++) {
        check(pthread_attr_setstacksize(&attributes, 32768), "pthread_attr_setstacksize");
        check(pthread_create(&thread, &attributes, in_thread, i == 0 ? &thread : NULL), "pthread_create");
        check(pthread_join(thread, NULL), "pthread_join");
    }
}

static void try_vfork(char **own)
{
    begin_and_work();
    for (int i = 0; i < 8; i++) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/proc/self/exe", own[0], "work", (char *)NULL);
            _exit(127);
        }
        wait_for(child, "the child's status");
        work();
    }
}

static bool is_below(int fd, const char *folder)
{
    char link[32];
    char path[512];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path));
    return length > (ssize_t)strlen(folder) && strncmp(path, folder, strlen(folder)) == 0;
}

/* Closes the descriptors 3 to 63, or those of files below `folder` if it is not NULL. Returns how many it closed. */
static int close_all(const char *folder)
{
    int closed = 0;
    /* `out` is above 100 */
    for (int fd = 3; fd < (folder == NULL ? 64 : 1024); fd++)
        if (folder == NULL || is_below(fd, folder))
            closed += close(fd) == 0;
    return closed;
}

/* Opens the program's own file as 3. Linux answers EBUSY while another thread's open(2) is about to get that number. */
static bool takes_three(void)
{
    while (dup2(STDIN_FILENO, 3) != 3)
        if (errno != EBUSY)
            return false;
    return true;
}

static void try_closefrom(char **arguments)
{
    const char *folder = arguments[2];
    close_all(folder);
    begin();
    NEED(close_all(folder) > 0);
    for (int i = 0; i < 8; i++) {
        close_all(folder); /* libvgpu's thread may open its files again only later */
        /* the program opens its own file at a number that libvgpu has used or will use */
        NEED(folder != NULL || takes_three());
        work();
        /* the program's own file is still open; libvgpu's descriptors would be closed by an exec */
        NEED(folder != NULL || fcntl(3, F_GETFD) == 0);
    }
}

static void at_exit(void)
{
    work();
    fprintf(out, "at exit\n");
    fflush(out);
}

static void at_end(void *unused)
{
    (void)unused;
    work();
}

static void *with_destructor(void *key)
{
    DO(cuCtxSetCurrent(shared_context));
    check(pthread_setspecific(*(pthread_key_t *)key, key), "pthread_setspecific");
    return NULL;
}

static void try_exit(char **unused)
{
    pthread_key_t key;
    pthread_t thread;
    (void)unused;
    begin_and_work();
    atexit(at_exit);
    check(pthread_key_create(&key, at_end), "pthread_key_create");
    check(pthread_create(&thread, NULL, with_destructor, &key), "pthread_create");
    check(pthread_join(thread, NULL), "pthread_join");
}

static void try_limits(char **words)
{
    struct rlimit limit = {(rlim_t)atoi(words[2]), (rlim_t)atoi(words[2])};
    DO(cuInit(0));
    check(setrlimit(RLIMIT_NOFILE, &limit), "setrlimit");
    begin_and_work();
}

static long used_ms(void)
{
    struct rusage usage;
    check(getrusage(RUSAGE_SELF, &usage), "getrusage");
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000;
}

/* A sandbox that opens all its files first and then allows no more: poll(2) of any descriptor is refused. */
static void try_sealed(char **unused)
{
    struct rlimit none = {0, 0};
    (void)unused;
    begin_and_work();
    check(setrlimit(RLIMIT_NOFILE, &none), "setrlimit");
    long before = used_ms();
    usleep(500000);
    NEED(used_ms() < before + 250); /* a thread that polls without sleeping would use a processor */
    for (int i = 0; i < 20; i++) {
        work();
        usleep(5000);
    }
}

static unsigned number_of(const char *call)
{
    static const struct {
        const char *name;
        unsigned number;
    } calls[] = {{"ppoll", SYS_ppoll},           {"connect", SYS_connect}, {"prctl", SYS_prctl},
                 {"setsockopt", SYS_setsockopt}, {"madvise", SYS_madvise}, {"sched_yield", SYS_sched_yield}};
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        if (strcmp(call, calls[i].name) == 0)
            return calls[i].number;
    fail("unknown system call", 0);
    return 0;
}

static void try_deny(char **words)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number_of(words[2]), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)atoi(words[3])),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof(code) / sizeof(code[0]), code};
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS");
    check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), "PR_SET_SECCOMP");
    begin_and_work();
}

static bool input_ended(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}

static void try_graphs(char **unused)
{
    CUstream stream;
    (void)unused;
    begin();
    DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    do {
        CUgraph graph;
        CUgraphExec exec;
        CUdeviceptr pointer;
        DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        DO(cuMemAllocAsync(&pointer, 4 * PIECE, stream));
        DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
        DO(cuMemFreeAsync(pointer, stream));
        DO(cuStreamEndCapture(stream, &graph));
        DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
        for (int i = 0; i < 16; i++)
            DO(cuGraphLaunch(exec, stream));
        DO(cuStreamSynchronize(stream));
        DO(cuGraphExecDestroy(exec));
        DO(cuGraphDestroy(graph));
    } while (!input_ended());
}

static void pass(int socket, int *fd, bool sends)
{
    char byte = 0;
    char room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room)};
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    *control = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    if (sends)
        memcpy(CMSG_DATA(control), fd, sizeof(*fd));
    NEED((sends ? sendmsg(socket, &message, 0) : recvmsg(socket, &message, 0)) == 1);
    if (!sends)
        memcpy(fd, CMSG_DATA(control), sizeof(*fd));
}

static void try_ranks(char **unused)
{
    int pair[2];
    (void)unused;
    check(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), "socketpair");
    bool exports = fork() != 0;
    close(pair[exports ? 1 : 0]); /* so each process sees the end of the other */
    begin();
    do {
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}}};
        CUmemGenericAllocationHandle handle;
        int fd = -1;
        if (exports) {
            DO(cuMemCreate(&handle, 4 * PIECE, &prop, 0));
            DO(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
            pass(pair[0], &fd, true);
        } else {
            pass(pair[1], &fd, false);
            DO(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        }
        close(fd);
        launch();
        DO(cuCtxSynchronize());
        DO(cuMemRelease(handle));
        /* each process sends a byte and waits for one, so both have stopped using the memory */
        pass(pair[exports ? 0 : 1], &pair[exports ? 0 : 1], true);
        pass(pair[exports ? 0 : 1], &fd, false);
        close(fd);
    } while (!input_ended());
}

/* Computes without a cancellation point, until libvgpu counts the process as idle. */
static void compute(void)
{
    struct timespec began;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - began.tv_sec) * 1000000000 + now.tv_nsec - began.tv_nsec < 8000000);
}

/* The thread is cancelled while it computes, and ends at the first cancellation point of the following calls. */
static void *allocate_and_launch(void *unused)
{
    (void)unused;
    DO(cuCtxSetCurrent(shared_context));
    for (;;) {
        CUdeviceptr pointer;
        compute();
        if (cu.cuMemAlloc_v2(&pointer, 1 << 20) == CUDA_SUCCESS)
            cu.cuMemFree_v2(pointer);
        launch();
        cu.cuCtxSynchronize();
        pthread_testcancel();
    }
    return NULL;
}

static void try_cancelled(char **unused)
{
    (void)unused;
    begin();
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        check(pthread_create(&thread, NULL, allocate_and_launch, NULL), "pthread_create");
        poll(NULL, 0, 20);
        pthread_cancel(thread);
        pthread_join(thread, NULL);
    }
    work();
}

/* A forked child has its parent's handles but not its contexts: each call fails at once. */
static void try_orphans(char **unused)
{
    (void)unused;
    /* before cuInit, every launch fails */
    NEED(cu.cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS);
    begin_and_work();
    pid_t child = fork();
    check(child < 0, "fork");
    if (child == 0) {
        NEED(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS);
        _exit(0);
    }
    int status;
    NEED(waitpid(child, &status, 0) == child && status == 0);
    launch();
    DO(cuCtxSynchronize());
}

static void try_work(char **unused)
{
    (void)unused;
    begin_and_work();
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(char **arguments);
    } ways[] = {{"forks", try_forks},         {"tiny-stacks", try_tiny_stacks},
                {"vfork", try_vfork},         {"closefrom", try_closefrom},
                {"exit", try_exit},           {"limits", try_limits},
                {"deny", try_deny},           {"graphs", try_graphs},
                {"ranks", try_ranks},         {"orphans", try_orphans},
                {"cancelled", try_cancelled}, {"work", try_work},
                {"sealed", try_sealed}};
    int own = fcntl(STDERR_FILENO, F_DUPFD, 100);
    out = own >= 0 ? fdopen(own, "w") : stderr;
    void *handle = load();
    if (argc > 1 && strcmp(argv[1], "reload") == 0) {
        try_reload(&handle);
        return 0;
    }
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        if (argc > 1 && strcmp(argv[1], ways[i].name) == 0) {
            ways[i].run(argv);
            return 0;
        }
    fail("unknown way", 0);
}
