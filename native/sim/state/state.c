/* The state file that all processes map: attaching to it, creating it, locking it. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static struct sim_state *g_state;
static char g_path[4096];
static struct stat g_file;
static pthread_mutex_t g_attach_lock = PTHREAD_MUTEX_INITIALIZER;

const char *sim_state_path(void)
{
    return g_path;
}

static struct sim_state *map_file(int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return NULL;
    if (st.st_size != (off_t)sizeof(struct sim_state)) {
        errno = EINVAL;
        return NULL;
    }
    struct sim_state *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return s == MAP_FAILED ? NULL : s;
}

struct sim_state *sim_attach_path(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct sim_state *s = map_file(fd);
    int saved = errno;
    fstat(fd, &g_file);
    close(fd);
    errno = saved;
    if (s == NULL)
        return NULL;
    if (s->magic != SIM_MAGIC || s->layout_version != SIM_LAYOUT_VERSION || s->size != sizeof(*s) ||
        s->device_count > SIM_MAX_DEVICES) {
        munmap(s, sizeof(*s));
        errno = EINVAL;
        return NULL;
    }
    snprintf(g_path, sizeof(g_path), "%s", path);
    return s;
}

struct sim_state *sim_attach(void)
{
    pthread_mutex_lock(&g_attach_lock);
    if (g_state == NULL) {
        const char *path = getenv(SIM_ENV_STATE);
        if (path != NULL && path[0] == '/')
            g_state = sim_attach_path(path);
    }
    struct sim_state *s = g_state;
    pthread_mutex_unlock(&g_attach_lock);
    return s;
}

/*
 * Returns the path of the state file, or "" without a node. vgpud recognises a simulated node by this symbol: both
 * simulated libraries export it, and NVIDIA's libraries do not.
 */
__attribute__((visibility("default"))) const char *vgpuSimStatePath(void);
const char *vgpuSimStatePath(void)
{
    return sim_attach() != NULL ? sim_state_path() : "";
}

static void init_mutex(pthread_mutex_t *m)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(m, &attr);
    pthread_mutexattr_destroy(&attr);
}

struct sim_state *sim_create_path(const char *path)
{
    /* Creates a new inode, so that the processes of an earlier node of this name keep their file. */
    if (unlink(path) != 0 && errno != ENOENT)
        return NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return NULL;
    struct sim_state *s = NULL;
    if (fchmod(fd, 0666) == 0 && ftruncate(fd, (off_t)sizeof(*s)) == 0)
        s = map_file(fd);
    int saved = errno;
    close(fd);
    errno = saved;
    if (s == NULL)
        return NULL;
    init_mutex(&s->lock);
    for (uint32_t i = 0; i < SIM_MAX_PROCS; i++)
        init_mutex(&s->alive[i]);
    for (uint32_t i = 0; i < SIM_MAX_DEVICES; i++) {
        init_mutex(&s->devices[i].engine_lock);
        init_mutex(&s->devices[i].rm_lock);
    }
    s->size = sizeof(*s);
    s->layout_version = SIM_LAYOUT_VERSION;
    snprintf(g_path, sizeof(g_path), "%s", path);
    return s;
}

/* Locks the mutex. Returns true if the last owner was killed while it held the mutex. */
static bool robust_lock(pthread_mutex_t *m)
{
    if (pthread_mutex_lock(m) != EOWNERDEAD)
        return false;
    pthread_mutex_consistent(m);
    return true;
}

void sim_lock(struct sim_state *s)
{
    /*
     * Nothing needs repair after the owner was killed: its change is either in its own entry, which the next sweep
     * drops, or became visible by one last store.
     */
    robust_lock(&s->lock);
}

void sim_unlock(struct sim_state *s)
{
    pthread_mutex_unlock(&s->lock);
}

struct sim_engine *sim_engine_of(struct sim_device *d, int gi, int ci)
{
    return gi == SIM_NONE ? &d->whole : &d->mig_engines[gi][ci];
}

void sim_engine_lock(struct sim_device *d)
{
    if (robust_lock(&d->engine_lock))
        d->engine_torn = 1;
}

void sim_engine_unlock(struct sim_device *d)
{
    pthread_mutex_unlock(&d->engine_lock);
}

void sim_rm_lock(struct sim_device *d)
{
    /* a call that was killed may have changed only some of its channels; no structure needs repair */
    robust_lock(&d->rm_lock);
}

void sim_rm_unlock(struct sim_device *d)
{
    pthread_mutex_unlock(&d->rm_lock);
}

int sim_open_state(void)
{
    return open(g_path, O_RDWR | O_CLOEXEC);
}

bool sim_is_state_file(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_dev == g_file.st_dev && st.st_ino == g_file.st_ino;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

uint64_t sim_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t sim_wall_us(void)
{
    return clock_ns(CLOCK_REALTIME) / 1000;
}

bool sim_parse_unsigned(const char *text, unsigned long long *value)
{
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return errno == 0 && *end == '\0';
}

int sim_branch(const struct sim_state *s)
{
    return atoi(s->driver_version);
}
