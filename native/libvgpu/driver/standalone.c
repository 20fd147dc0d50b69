#include "standalone.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "functions.h"
#include "hami_limits.h"
#include "lease_limits.h"

#define SHARED_MEMORY "/dev/shm"
/* HAMi's variable: processes that name the same file share the limits */
#define SCOPE "CUDA_DEVICE_MEMORY_SHARED_CACHE"
#define VISIBLE "CUDA_VISIBLE_DEVICES"

enum { FOLDER_BYTES = 48, DRAFT_BYTES = 64, PATH_BYTES = 96 };

extern char **environ;

static void write_uuid(struct vgpu_device_limits *device, const CUuuid *uuid, const char *kind)
{
    int at = snprintf(device->uuid, sizeof(device->uuid), "%s-", kind);
    for (int i = 0; i < 16; i++) {
        const char *form = i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x";
        at += snprintf(device->uuid + at, sizeof(device->uuid) - (size_t)at, form, (unsigned char)uuid->bytes[i]);
    }
}

/* Names the devices in CUDA's order. Only the second version of cuDeviceGetUuid returns a MIG device's own UUID. */
static int name_by_cuda(struct vgpu_limits *limits)
{
    int count = 0;
    if (CALL(cuInit, 0) != CUDA_SUCCESS || CALL(cuDeviceGetCount, &count) != CUDA_SUCCESS || count == 0)
        return -ENODEV;
    if (count > (int)VGPU_MAX_DEVICES)
        return -E2BIG;
    for (int i = 0; i < count; i++) {
        CUuuid card;
        CUuuid own;
        bool first = CALL(cuDeviceGetUuid, &card, i) == CUDA_SUCCESS;
        bool second = CALL(cuDeviceGetUuid_v2, &own, i) == CUDA_SUCCESS;
        if (!first && !second)
            return -ENODEV;
        bool instance = first && second && memcmp(&card, &own, sizeof(card)) != 0;
        write_uuid(&limits->devices[i], second ? &own : &card, instance ? "MIG" : "GPU");
    }
    limits->device_count = (uint32_t)count;
    return 0;
}

static bool uuid_of_index(unsigned index, char *uuid)
{
    nvmlDevice_t device;
    return CALL_NVML(nvmlDeviceGetHandleByIndex_v2, index, &device) == NVML_SUCCESS &&
           CALL_NVML(nvmlDeviceGetUUID, device, uuid, VGPU_UUID_BYTES) == NVML_SUCCESS;
}

/* Resolves one entry of CUDA_VISIBLE_DEVICES: an index, a MIG UUID, or a UUID or the beginning of one. */
static bool uuid_of_entry(const char *entry, size_t length, unsigned count, char *uuid)
{
    char *end;
    unsigned long index = strtoul(entry, &end, 10);
    if (end == entry + length && length > 0)
        return index < count && uuid_of_index((unsigned)index, uuid);
    if (length < VGPU_UUID_BYTES && strncmp(entry, "MIG-", 4) == 0) {
        memcpy(uuid, entry, length);
        uuid[length] = '\0';
        return true;
    }
    for (unsigned i = 0; length > 4 && i < count; i++)
        if (uuid_of_index(i, uuid) && strncmp(uuid, entry, length) == 0)
            return true;
    return false;
}

/*
 * Names the devices in NVML's order, filtered by CUDA_VISIBLE_DEVICES as CUDA would filter them. Used in a process that
 * calls NVML but not CUDA.
 */
static int name_by_nvml(struct vgpu_limits *limits)
{
    unsigned count = 0;
    unsigned named = 0;
    const char *visible = getenv(VISIBLE);
    if (CALL_NVML(nvmlDeviceGetCount_v2, &count) != NVML_SUCCESS)
        return -EAGAIN;
    for (unsigned i = 0; visible == NULL && i < count && i < VGPU_MAX_DEVICES; i++)
        named += uuid_of_index(i, limits->devices[named].uuid) ? 1 : 0;
    while (visible != NULL && *visible != '\0' && named < VGPU_MAX_DEVICES) {
        size_t length = strcspn(visible, ",");
        if (!uuid_of_entry(visible, length, count, limits->devices[named].uuid))
            break; /* CUDA too does not show the entries after an invalid one */
        named++;
        visible += length + (visible[length] == ',' ? 1 : 0);
    }
    limits->device_count = named;
    return named > 0 ? 0 : -ENODEV;
}

static void set_figures(struct vgpu_limits *limits, const struct vgpu_hami_limits *asked)
{
    for (uint32_t d = 0; d < limits->device_count; d++) {
        struct vgpu_device_limits *device = &limits->devices[d];
        device->memory_bytes = asked->memory_bytes[d] != 0 ? asked->memory_bytes[d] : INT64_MAX;
        device->share = asked->share[d] != 0 ? asked->share[d] : VGPU_SHARE_ALL;
        device->share_policy = asked->share[d] != 0 ? VGPU_SHARE_HARD : VGPU_SHARE_NONE;
    }
}

/* Computes the 64-bit FNV-1a hash of the bytes, continued from `seed`. */
static uint64_t hash(uint64_t seed, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++)
        seed = (seed ^ at[i]) * 0x100000001b3u;
    return seed;
}

static uint64_t hash_of(const struct vgpu_limits *limits)
{
    const char *scope = getenv(SCOPE);
    uint64_t value = hash(0xcbf29ce484222325u, limits->devices, limits->device_count * sizeof(limits->devices[0]));
    return scope != NULL ? hash(value, scope, strlen(scope)) : value;
}

/* Returns 0 if the folder belongs to this user and no other user has access to it; otherwise -errno. */
static int check_folder(const char *path)
{
    struct stat about;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int error = fstat(fd, &about) != 0 ? -errno : 0;
    close(fd);
    if (error == 0 && (about.st_uid != geteuid() || (about.st_mode & 077) != 0))
        error = -EPERM;
    return error;
}

static int write_file(const char *folder, const char *name, const void *head, size_t head_size, size_t size)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%.63s/%.16s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    int error = ftruncate(fd, (off_t)size) != 0 || write(fd, head, head_size) != (ssize_t)head_size ? -errno : 0;
    close(fd);
    return error;
}

static void remove_draft(const char *draft)
{
    static const char *const names[] = {VGPU_LIMITS_FILE, VGPU_USAGE_FILE};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%.63s/%.16s", draft, names[i]);
        unlink(path);
    }
    rmdir(draft);
}

/* Creates the folder atomically. If two processes do so concurrently, the second uses the folder of the first. */
static int make_folder(const char *folder, const struct vgpu_limits *limits)
{
    char draft[DRAFT_BYTES];
    const uint32_t usage_head[] = {VGPU_LEASE_MAGIC, VGPU_LEASE_VERSION};
    snprintf(draft, sizeof(draft), "%.47s.%d", folder, (int)getpid());
    remove_draft(draft); /* one may be left of an earlier process with the same pid, which died in this function */
    if (mkdir(draft, 0700) != 0)
        return -errno;
    int error = write_file(draft, VGPU_LIMITS_FILE, limits, sizeof(*limits), sizeof(*limits));
    if (error == 0)
        error = write_file(draft, VGPU_USAGE_FILE, usage_head, sizeof(usage_head), VGPU_USAGE_FILE_BYTES);
    if (error == 0 && rename(draft, folder) == 0)
        return 0;
    if (error == 0)
        error = errno == EEXIST || errno == ENOTEMPTY ? 0 : -errno;
    remove_draft(draft);
    return error != 0 ? error : check_folder(folder);
}

int vgpu_standalone_lease(struct vgpu_lease_view *view, bool computes)
{
    char folder[FOLDER_BYTES];
    struct vgpu_hami_limits asked;
    struct vgpu_limits limits = {.magic = VGPU_LEASE_MAGIC,
                                 .version = VGPU_LEASE_VERSION,
                                 .generation = 2,
                                 .allocation = "standalone",
                                 .state = VGPU_LEASE_OPEN};
    if (!vgpu_hami_asked(environ))
        return 0;
    const char *wrong = vgpu_hami_read(environ, &asked);
    if (wrong != NULL) {
        snprintf(view->wrong, sizeof(view->wrong), "%.100s is not a limit", wrong);
        return -EINVAL;
    }
    int error = computes ? name_by_cuda(&limits) : name_by_nvml(&limits);
    if (error != 0)
        return error;
    set_figures(&limits, &asked);
    snprintf(folder, sizeof(folder), SHARED_MEMORY "/vgpu-%u-%016llx", (unsigned)geteuid(),
             (unsigned long long)hash_of(&limits));
    error = check_folder(folder);
    if (error == -ENOENT)
        error = make_folder(folder, &limits);
    if (error != 0)
        snprintf(view->wrong, sizeof(view->wrong), "%s cannot be used", folder);
    memcpy(view->folder, folder, sizeof(folder));
    return error != 0 ? error : 1;
}
