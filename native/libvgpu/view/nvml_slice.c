#include "nvml_slice.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "functions.h"
#include "in_child.h"
#include "lease_limits.h"

#define NO_INSTANCE 0xffffffffu /* NVML's value for a process outside of MIG instances */

enum { UNKNOWN, ABSENT, PRESENT };
static int state;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
/*
 * The lease stays open: closing any descriptor of `usage` would drop the slot's lock of a process that also computes.
 */
static struct vgpu_lease_view view;

const struct vgpu_lease_view *vgpu_nvml_lease(void)
{
    int now = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
    if (now == UNKNOWN) {
        pthread_mutex_lock(&opening);
        int found = state == UNKNOWN ? vgpu_lease_open(&view, false) : -EAGAIN;
        /* -EAGAIN: NVML's table was requested before NVML is initialised, so the lease is looked for again later */
        if (found != -EAGAIN)
            __atomic_store_n(&state, found == 1 ? PRESENT : ABSENT, __ATOMIC_RELEASE);
        now = state;
        pthread_mutex_unlock(&opening);
    }
    return now == PRESENT ? &view : NULL;
}

int vgpu_nvml_index(nvmlDevice_t device, uint64_t *limit_bytes)
{
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    unsigned char asked[16];
    unsigned char held[16];
    struct vgpu_limits limits;
    const struct vgpu_lease_view *lease = vgpu_nvml_lease();
    if (lease == NULL || CALL_NVML(nvmlDeviceGetUUID, device, uuid, sizeof(uuid)) != NVML_SUCCESS ||
        vgpu_uuid_parse(uuid, asked) != 0)
        return -1;
    if (vgpu_limits_read(lease->limits, &limits) != 0)
        limits = lease->first;
    for (unsigned i = 0; i < limits.device_count; i++)
        if (vgpu_uuid_parse(limits.devices[i].uuid, held) == 0 && memcmp(asked, held, sizeof(held)) == 0) {
            *limit_bytes = limits.devices[i].memory_bytes;
            return (int)i;
        }
    return -1;
}

/*
 * Returns the pid of the process that holds a slot, in this pid namespace; 0 if no process holds it or it is not
 * visible here. (A process does not see its own lock.)
 */
static unsigned holder(int fd, uint32_t slot, const struct vgpu_slot *claimed)
{
    struct flock range = {.l_type = F_WRLCK,
                          .l_whence = SEEK_SET,
                          .l_start = (off_t)(offsetof(struct vgpu_usage, slots) + slot * sizeof(struct vgpu_slot)),
                          .l_len = 1};
    if (__atomic_load_n(&claimed->owner, __ATOMIC_RELAXED) == 0 || fcntl(fd, F_GETLK, &range) != 0)
        return 0;
    if (range.l_type != F_UNLCK)
        return range.l_pid > 0 ? (unsigned)range.l_pid : 0;
    return claimed->pid == getpid() ? (unsigned)claimed->pid : 0;
}

unsigned vgpu_nvml_processes(int index, nvmlProcessInfo_t *processes, unsigned most)
{
    const struct vgpu_lease_view *lease = vgpu_nvml_lease();
    unsigned count = 0;
    if (lease == NULL || lease->usage == NULL)
        return 0;
    uint32_t high = __atomic_load_n(&lease->usage->slot_high, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < high && i < VGPU_MAX_SLOTS; i++) {
        const struct vgpu_slot *slot = &lease->usage->slots[i];
        const struct vgpu_slot_device *device = &slot->devices[index];
        uint64_t bytes = __atomic_load_n(&device->used_bytes, __ATOMIC_RELAXED) +
                         __atomic_load_n(&device->context_bytes, __ATOMIC_RELAXED);
        unsigned pid = bytes > 0 ? holder(lease->usage_fd, i, slot) : 0;
        if (pid == 0)
            continue;
        if (count < most)
            processes[count] = (nvmlProcessInfo_t){
                .pid = pid, .usedGpuMemory = bytes, .gpuInstanceId = NO_INSTANCE, .computeInstanceId = NO_INSTANCE};
        count++;
    }
    return count;
}

static void reset(void)
{
    pthread_mutex_init(&opening, NULL);
}
VGPU_IN_CHILD(reset);
