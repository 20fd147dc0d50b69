/*
 * An MPS client: cuInit finds the daemon through CUDA_MPS_PIPE_DIRECTORY. Without a daemon the process silently runs
 * without MPS.
 *
 * The stand-in daemon (native/sim/mps) answers HELLO with one line: share, devices, limits. The connection then lasts
 * as long as the process. When it closes, every call fails with CUDA_ERROR_MPS_RPC_FAILURE, as with NVIDIA's daemon
 * (measured).
 */
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "internal.h"

#define DEFAULT_PIPE_DIRECTORY "/tmp/nvidia-mps"

static int g_socket = -1;

static int open_control(void)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/control",
                     directory == NULL ? DEFAULT_PIPE_DIRECTORY : directory);
    if (n >= (int)sizeof(address.sun_path))
        return -1;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Reads one line without its newline. Returns false if the daemon closed the connection, or the read fails. */
static bool read_line(int fd, char *line, size_t size)
{
    size_t n = 0;
    while (n + 1 < size) {
        ssize_t got = read(fd, line + n, 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        if (line[n] == '\n')
            break;
        n++;
    }
    line[n] = '\0';
    return true;
}

static uint64_t parse_size(const char *text)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    switch (*end) {
    case 'K':
    case 'k':
        return n << 10;
    case 'M':
    case 'm':
        return n << 20;
    case 'G':
    case 'g':
        return n << 30;
    default:
        return n;
    }
}

static void limit_device(int ordinal, uint64_t bytes)
{
    struct cu_device *d = &cu.devices[ordinal];
    if (bytes > 0 && (d->mps_limit == 0 || bytes < d->mps_limit)) /* a limit may only be lowered */
        d->mps_limit = bytes;
}

/* Applies a list of limits by ordinal or by UUID, for example "0=1G,GPU-uuid=512M". Changes `text`. */
static void apply_limits(char *text)
{
    char *word;
    while ((word = strsep(&text, ",")) != NULL) {
        char *value = strchr(word, '=');
        unsigned long long ordinal;
        if (value == NULL)
            continue;
        *value++ = '\0';
        if (sim_parse_unsigned(word, &ordinal) && ordinal < (unsigned)cu.device_count)
            limit_device((int)ordinal, parse_size(value));
        for (int i = 0; i < cu.device_count; i++)
            if (strcmp(word, cu_sim_device(i)->uuid) == 0)
                limit_device(i, parse_size(value));
    }
}

/*
 * Applies the limits that the environment names. `fixed`: the process is in a static partition, in which percentages
 * have no effect (MPS guide).
 */
static void apply_environment(bool fixed)
{
    char text[1024];
    const char *limits = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    const char *percent = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    if (limits != NULL && snprintf(text, sizeof(text), "%s", limits) < (int)sizeof(text))
        apply_limits(text);
    double wanted = percent == NULL ? 0 : atof(percent) / 100.0;
    if (!fixed && wanted > 0 && wanted < cu.mps_fraction)
        cu.mps_fraction = wanted;
}

CUresult cu_mps_connect(void)
{
    char line[4096], devices[1024], hello[192];
    const char *partition = getenv("CUDA_MPS_SM_PARTITION");
    double percent;
    int used = 0, refusal;
    int fd = open_control();
    if (fd < 0)
        return CUDA_SUCCESS; /* no daemon: the process runs without MPS and no error is reported, as with the driver */
    int n = snprintf(hello, sizeof(hello), "HELLO %d %.120s\n", (int)getpid(), partition == NULL ? "" : partition);
    if (send(fd, hello, (size_t)n, MSG_NOSIGNAL) != n || !read_line(fd, line, sizeof(line))) {
        close(fd);
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    }
    if (sscanf(line, "REFUSED %d", &refusal) == 1) {
        close(fd);
        return (CUresult)refusal;
    }
    bool fixed = sscanf(line, "FIXED %lf %1023s %n", &percent, devices, &used) == 2;
    if (!fixed && sscanf(line, "OK %lf %1023s %n", &percent, devices, &used) != 2) {
        close(fd);
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    }
    g_socket = fd;
    cu.mps = true;
    cu.mps_fraction = percent / 100.0;
    CU_TRY(cu_find_devices(strcmp(devices, "*") == 0 ? NULL : devices));
    CU_CHECK(cu.device_count > 0, CUDA_ERROR_NO_DEVICE);
    apply_limits(line + used);
    apply_environment(fixed);
    return CUDA_SUCCESS;
}

void cu_mps_check(void)
{
    char byte;
    if (!cu.mps || atomic_load_explicit(&cu.mps_fault, memory_order_relaxed) != 0)
        return;
    ssize_t n = recv(g_socket, &byte, 1, MSG_DONTWAIT);
    if (n == 1 && byte == 'T')
        atomic_store(&cu.mps_fault, CUDA_ERROR_MPS_CLIENT_TERMINATED);
    else if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        atomic_store(&cu.mps_fault, CUDA_ERROR_MPS_RPC_FAILURE);
}
