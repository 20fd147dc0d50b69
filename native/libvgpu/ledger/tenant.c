#include "tenant.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "in_child.h"
#include "channels.h"
#include "lease_open.h"
#include "lease_limits.h"
#include "arbiter_link.h"
#include "slot.h"
#include "slot_lock.h"
#include "thread.h"
int vgpu_tenant_phase; /* written last, with the lock `entry` held */
static pthread_mutex_t entry = PTHREAD_MUTEX_INITIALIZER;
static struct vgpu_lease_view lease = {.usage_fd = -1};
static struct vgpu_account account = {.slow = PTHREAD_MUTEX_INITIALIZER};
static uint64_t generation_seen;
static uint64_t memory_limit[VGPU_MAX_DEVICES];
static bool complained;
static pthread_once_t fork_handler = PTHREAD_ONCE_INIT;

/* Prints an error, at most one line per process. */
static void complain(const char *what, int error)
{
    char text[512];
    if (complained)
        return;
    complained = true;
    int length = snprintf(text, sizeof(text), "libvgpu: %s (%s): CUDA is refused\n", what, strerror(error));
    if (length > 0 && write(STDERR_FILENO, text, (size_t)length) < 0)
        return;
}

static void set_limits(const struct vgpu_limits *limits)
{
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++) {
        bool grants = d < limits->device_count && limits->state != VGPU_LEASE_CLOSED;
        __atomic_store_n(&memory_limit[d], grants ? limits->devices[d].memory_bytes : 0, __ATOMIC_RELAXED);
    }
}

/* Reads the devices of the lease. After a move, an entry still is the same slice, on another device. */
static void set_devices(const struct vgpu_limits *limits)
{
    for (unsigned d = 0; d < limits->device_count; d++)
        memcpy(lease.first.devices[d].uuid, limits->devices[d].uuid, sizeof(lease.first.devices[d].uuid));
}

/*
 * Reads the limits. After a failure the last valid limits stay in force, and the next attempt follows after the next
 * change of generation. So a vgpud that died while writing does not delay every allocation.
 */
static void refresh_limits(void)
{
    struct vgpu_limits now;
    pthread_mutex_lock(&entry);
    uint64_t generation = vgpu_limits_generation(lease.limits);
    if (vgpu_limits_read(lease.limits, &now) == 0 && now.device_count == lease.first.device_count) {
        set_limits(&now);
        set_devices(&now);
    }
    __atomic_store_n(&generation_seen, generation, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&entry);
}

static void refresh_if_changed(void)
{
    uint64_t seen = __atomic_load_n(&generation_seen, __ATOMIC_ACQUIRE);
    if (vgpu_limits_generation(lease.limits) != seen)
        refresh_limits();
}

uint64_t vgpu_tenant_limit(unsigned device)
{
    refresh_if_changed();
    return __atomic_load_n(&memory_limit[device], __ATOMIC_RELAXED);
}

unsigned vgpu_tenant_devices(void)
{
    return lease.first.device_count;
}

void vgpu_tenant_uuid(unsigned device, char uuid[VGPU_UUID_BYTES])
{
    refresh_if_changed();
    pthread_mutex_lock(&entry);
    memcpy(uuid, lease.first.devices[device].uuid, VGPU_UUID_BYTES);
    pthread_mutex_unlock(&entry);
}

const char *vgpu_tenant_folder(void)
{
    return lease.folder;
}

struct vgpu_account *vgpu_tenant_account(void)
{
    return &account;
}

bool vgpu_tenant_reclaim(void)
{
    if (!vgpu_slot_others(account.usage, account.slot)) /* no other slot is in use: the system calls below are saved */
        return false;
    int cancels = vgpu_thread_keep();
    pthread_mutex_lock(&entry);
    int fd = vgpu_slot_lock_hold();
    int cleared = fd >= 0 ? vgpu_slot_clear_dead(fd, lease.usage, account.slot, !vgpu_link_up()) : 0;
    pthread_mutex_unlock(&entry);
    bool awaited = fd >= 0 && cleared == 0 && vgpu_link_up() && vgpu_slot_await_clear(fd, lease.usage, account.slot);
    vgpu_thread_release(cancels);
    return cleared > 0 || awaited;
}

bool vgpu_tenant_lock_contexts(void)
{
    int fd = vgpu_slot_lock_hold();
    return fd >= 0 && vgpu_slot_lock_contexts(fd);
}

void vgpu_tenant_unlock_contexts(void)
{
    int fd = vgpu_slot_lock_hold();
    if (fd >= 0)
        vgpu_slot_unlock_contexts(fd);
}

/*
 * Resets the state in a forked child. It has none of the parent's contexts, slot or threads, and enters again if it
 * uses CUDA. Locks may have been held by other threads of the parent. One of them may have been entering, so its
 * mappings stay.
 */
static void forget_in_child(void)
{
    vgpu_in_child();
    pthread_mutex_init(&entry, NULL);
    pthread_mutex_init(&account.slow, NULL);
    if (vgpu_tenant_phase != VGPU_TENANT_LIMITED)
        return;
    vgpu_tenant_phase = VGPU_TENANT_COLD;
    munmap((void *)lease.limits, sizeof(struct vgpu_limits));
    munmap(lease.usage, sizeof(struct vgpu_usage));
}

/*
 * Registers the handler for forks. Called before the first lock is taken, because a child may be forked while another
 * thread enters for the first time.
 */
static void set_fork_handler(void)
{
    (void)vgpu_thread_at_fork(forget_in_child);
}

static void close_lease(void)
{
    munmap((void *)lease.limits, sizeof(struct vgpu_limits));
    munmap(lease.usage, sizeof(struct vgpu_usage));
    vgpu_slot_lock_drop(); /* from now on a process that starts may clear the slot */
}

/* Takes a slot and registers. An arbiter that refuses is an error only if the lease is closed. */
static CUresult join(void)
{
    int slot = lease.first.state != VGPU_LEASE_CLOSED ? vgpu_slot_claim(lease.usage_fd, lease.usage) : -ESHUTDOWN;
    int error = 0;
    if (slot < 0) {
        close(lease.usage_fd);
    } else {
        vgpu_slot_lock_start(lease.folder, lease.usage, (uint32_t)slot, lease.usage_fd);
        vgpu_channels_start(lease.usage_fd, (uint32_t)slot);
        error = vgpu_link_start(lease.folder, lease.usage, (uint32_t)slot);
        slot = error != 0 ? error : slot;
    }
    if (slot < 0) {
        complain(slot == -ESHUTDOWN ? "the lease is closed" : error != 0 ? "no thread" : "no process slot", -slot);
        return slot == -ESHUTDOWN ? CUDA_ERROR_NOT_PERMITTED
               : error != 0       ? CUDA_ERROR_OPERATING_SYSTEM
                                  : CUDA_ERROR_OUT_OF_MEMORY;
    }
    account.usage = lease.usage;
    account.slot = (uint32_t)slot;
    return CUDA_SUCCESS;
}

static void complain_of_lease(int error)
{
    char what[400];
    (void)snprintf(what, sizeof(what), "the lease %.320s cannot be used",
                   lease.folder[0] != '\0' ? lease.folder : "of " VGPU_LEASE_ENV);
    complain(lease.wrong[0] != '\0' ? lease.wrong : what, error);
}

static CUresult enter_first(void)
{
    int found = vgpu_lease_open(&lease, true);
    if (found == -ENODEV)
        return CUDA_ERROR_NO_DEVICE;
    if (found < 0) {
        complain_of_lease(-found);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (found == 0) {
        vgpu_channels_ignore();
        __atomic_store_n(&vgpu_tenant_phase, VGPU_TENANT_UNLIMITED, __ATOMIC_RELEASE);
        return CUDA_SUCCESS;
    }
    CUresult result = join();
    if (result != CUDA_SUCCESS) {
        close_lease();
        return result;
    }
    set_limits(&lease.first);
    generation_seen = 1; /* an odd number, which no complete page of limits has: the first use reads the limits */
    __atomic_store_n(&vgpu_tenant_phase, VGPU_TENANT_LIMITED, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

CUresult vgpu_tenant_enter_first(bool *limited)
{
    CUresult result = CUDA_SUCCESS;
    int cancels = vgpu_thread_keep();
    pthread_once(&fork_handler, set_fork_handler);
    pthread_mutex_lock(&entry);
    if (vgpu_tenant_phase == VGPU_TENANT_COLD)
        result = enter_first();
    *limited = vgpu_tenant_phase == VGPU_TENANT_LIMITED;
    pthread_mutex_unlock(&entry);
    vgpu_thread_release(cancels);
    return result;
}
