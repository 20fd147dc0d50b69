#include "channels.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arbiter_link.h"
#include "cuda_api.h"
#include "functions.h"
#include "in_child.h"
#include "next_symbol.h"
#include "rm.h"

/* maximum of groups in the process, including groups for copies; further ones are counted as lost */
#define GROUPS_MAX 1024u
#define CHANNELS_MAX 64u /* maximum of channels in one group */
#define SUBDEVICES_MAX 64u

typedef int (*ioctl_fn)(int fd, unsigned long request, ...);

struct group {
    uint32_t client; /* 0: the entry is free */
    uint32_t device; /* handle of the device */
    uint32_t object;
    int file;
    bool computes;
    /* libcuda makes the channels one by one and then schedules the group, which enables all of them */
    bool scheduled;
    uint32_t count;
    uint32_t channels[CHANNELS_MAX];
};

struct subdevice {
    uint32_t client; /* 0: the entry is free */
    uint32_t device; /* handle of the device */
    uint32_t object;
    bool named;
    uint8_t uuid[16];
};

static struct group groups[GROUPS_MAX];
static uint32_t groups_high;
static struct subdevice subdevices[SUBDEVICES_MAX];
static bool lost; /* a group or a channel did not fit in `groups` */
static struct vgpu_channel_table *table;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ioctl_fn next_ioctl;
static ioctl_fn drivers_ioctl;
static bool ignored; /* the process is not limited, so its channels are not in the table */

static ioctl_fn find_next(void)
{
    ioctl_fn next = __atomic_load_n(&next_ioctl, __ATOMIC_ACQUIRE);
    if (next == NULL) {
        next = (ioctl_fn)vgpu_next_definition("ioctl", &next_ioctl);
        __atomic_store_n(&next_ioctl, next, __ATOMIC_RELEASE);
    }
    return next;
}

/*
 * Returns the ioctl that libcuda finds in itself or in its dependencies. If there is none, or libcuda is not loaded,
 * returns the next definition after libvgpu.
 */
static ioctl_fn find_drivers(void)
{
    ioctl_fn found = __atomic_load_n(&drivers_ioctl, __ATOMIC_ACQUIRE);
    if (found != NULL)
        return found;
    found = (ioctl_fn)vgpu_library_symbol(VGPU_CUDA, "ioctl");
    __atomic_store_n(&drivers_ioctl, found, __ATOMIC_RELEASE);
    return found != NULL ? found : find_next();
}

static int call_next(int fd, unsigned long request, void *argument)
{
    ioctl_fn next = _IOC_TYPE(request) == RM_IOCTL_TYPE ? find_drivers() : find_next();
    return next != NULL ? next(fd, request, argument) : (int)syscall(SYS_ioctl, fd, request, argument);
}

/* --- below: the caller holds the lock */

static struct group *group_of(uint32_t client, uint32_t object)
{
    for (uint32_t i = 0; i < groups_high; i++)
        if (groups[i].client == client && groups[i].object == object)
            return &groups[i];
    return NULL;
}

static struct group *group_add(const struct rm_alloc *made, int file)
{
    uint32_t at = 0;
    while (at < groups_high && groups[at].client != 0)
        at++;
    if (at == GROUPS_MAX) {
        lost = true;
        return NULL;
    }
    groups_high += at == groups_high;
    groups[at] = (struct group){.client = made->client, .device = made->parent, .object = made->object, .file = file};
    return &groups[at];
}

/*
 * Records a channel. If the channel's parent is not a known group, the driver makes a group for the channel, and the
 * channel's handle stands for that group here.
 */
static void channel_add(const struct rm_alloc *made, int file)
{
    struct group *group = group_of(made->client, made->parent);
    if (group == NULL)
        group = group_add(made, file);
    if (group != NULL && group->count < CHANNELS_MAX)
        group->channels[group->count++] = made->object;
    else
        lost = true;
}

static struct group *group_with(uint32_t client, uint32_t channel)
{
    for (uint32_t i = 0; i < groups_high; i++)
        for (uint32_t c = 0; c < groups[i].count && groups[i].client == client; c++)
            if (groups[i].channels[c] == channel)
                return &groups[i];
    return NULL;
}

static bool carries_kernels(const struct group *group)
{
    return group != NULL && group->client != 0 && group->computes && group->scheduled;
}

/* Records a compute object below a channel. Returns true if the channel's group carries kernels from now on. */
static bool compute_add(const struct rm_alloc *made)
{
    struct group *group = group_with(made->client, made->parent);
    if (group == NULL || group->computes)
        return false;
    group->computes = true;
    return group->scheduled;
}

/* Records that a group is scheduled. Returns true if it carries kernels from now on. */
static bool schedule_add(const struct rm_control *made)
{
    struct group *group = group_of(made->client, made->object);
    if (made->command == RM_SCHEDULE_CHANNEL)
        group = group_with(made->client, made->object);
    if (group == NULL || group->scheduled)
        return false;
    group->scheduled = true;
    return group->computes;
}

static void subdevice_add(const struct rm_alloc *made)
{
    for (unsigned i = 0; i < SUBDEVICES_MAX; i++)
        if (subdevices[i].client == 0) {
            subdevices[i] = (struct subdevice){.client = made->client, .device = made->parent, .object = made->object};
            return;
        }
    /* all entries are in use: groups on this device count as lost (publish_group) */
}

/* Asks the driver for the UUID of the subdevice's device, unless it is known. The call only reads. */
static void name_subdevice(struct subdevice *subdevice, int file)
{
    struct rm_gid gid = {.flags = RM_GID_BINARY};
    struct rm_control control = {.client = subdevice->client,
                                 .object = subdevice->object,
                                 .command = RM_GET_GID,
                                 .parameters = (uint64_t)(uintptr_t)&gid,
                                 .parameters_size = sizeof(gid)};
    if (subdevice->named || call_next(file, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &control) != 0 ||
        control.status != RM_OK || gid.length != sizeof(subdevice->uuid))
        return;
    memcpy(subdevice->uuid, gid.data, sizeof(subdevice->uuid));
    subdevice->named = true;
}

static struct subdevice *subdevice_of(const struct group *group)
{
    for (unsigned i = 0; i < SUBDEVICES_MAX; i++)
        if (subdevices[i].client == group->client && subdevices[i].device == group->device)
            return &subdevices[i];
    return NULL;
}

/*
 * Appends a channel group to the process's table of channels from index `at`, in entries of up to VGPU_GROUP_CHANNELS
 * channels. Returns the next free index. Sets table->lost if the group's device is not known or the table is full.
 */
static uint32_t publish_group(const struct group *group, uint32_t at)
{
    struct subdevice *subdevice = subdevice_of(group);
    if (subdevice != NULL)
        name_subdevice(subdevice, group->file);
    if (subdevice == NULL || !subdevice->named) {
        table->lost = 1;
        return at;
    }
    for (uint32_t c = 0; c < group->count; c += VGPU_GROUP_CHANNELS) {
        if (at == VGPU_MAX_GROUPS) {
            table->lost = 1;
            break;
        }
        uint32_t left = group->count - c;
        struct vgpu_channel_group *entry = &table->groups[at++];
        *entry = (struct vgpu_channel_group){.file = (uint32_t)group->file,
                                             .client = group->client,
                                             .subdevice = subdevice->object,
                                             .count = left < VGPU_GROUP_CHANNELS ? left : VGPU_GROUP_CHANNELS};
        memcpy(entry->uuid, subdevice->uuid, sizeof(entry->uuid));
        memcpy(entry->channels, &group->channels[c], entry->count * sizeof(entry->channels[0]));
    }
    return at;
}

static void publish(void)
{
    uint32_t at = 0;
    if (table == NULL)
        return;
    uint64_t generation = table->generation | 1;
    __atomic_store_n(&table->generation, generation, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    table->lost = lost;
    for (uint32_t i = 0; i < groups_high; i++)
        if (carries_kernels(&groups[i]))
            at = publish_group(&groups[i], at);
    table->count = at;
    __atomic_store_n(&table->generation, generation + 1, __ATOMIC_RELEASE);
}

/* Forgets an object. Returns true if it was a group that carries kernels, or a channel of such a group. */
static bool forget_in_group(struct group *group, uint32_t client, uint32_t object)
{
    if (group->client != client)
        return false;
    if (object == client || object == group->device || object == group->object) {
        bool carried = carries_kernels(group);
        *group = (struct group){0};
        return carried;
    }
    for (uint32_t c = 0; c < group->count; c++)
        if (group->channels[c] == object) {
            group->channels[c] = group->channels[--group->count];
            return carries_kernels(group);
        }
    return false;
}

static bool forget(uint32_t client, uint32_t object)
{
    bool changed = false;
    for (uint32_t i = 0; i < groups_high; i++)
        changed |= forget_in_group(&groups[i], client, object);
    while (groups_high > 0 && groups[groups_high - 1].client == 0)
        groups_high--;
    for (unsigned i = 0; i < SUBDEVICES_MAX; i++)
        if (subdevices[i].client == client &&
            (object == client || object == subdevices[i].device || object == subdevices[i].object))
            subdevices[i] = (struct subdevice){0};
    return changed;
}

/* --- below: the caller does not hold the lock */

static void tell(bool changed)
{
    struct vgpu_message message = {.kind = VGPU_MSG_CHANNELS, .version = VGPU_LEASE_VERSION};
    if (changed && table != NULL)
        /* a lost message does no harm, because the arbiter reads the table again at each slice */
        vgpu_link_send(&message);
}

void vgpu_channels_moved(void)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < SUBDEVICES_MAX; i++)
        subdevices[i].named = false;
    publish();
    pthread_mutex_unlock(&lock);
    tell(true);
}

static void note_made(const struct rm_alloc *made, int file)
{
    bool changed = false;
    uint32_t low = made->class_id & 0xff;
    if (made->class_id != RM_CLASS_SUBDEVICE && made->class_id != RM_CLASS_CHANNEL_GROUP &&
        (made->class_id <= 0xff || (low != RM_CLASS_CHANNEL_LOW && low != RM_CLASS_COMPUTE_LOW)))
        return;
    pthread_mutex_lock(&lock);
    if (made->class_id == RM_CLASS_SUBDEVICE)
        subdevice_add(made);
    else if (made->class_id == RM_CLASS_CHANNEL_GROUP)
        group_add(made, file);
    else if (low == RM_CLASS_CHANNEL_LOW)
        channel_add(made, file);
    else
        changed = compute_add(made);
    struct group *into = low == RM_CLASS_CHANNEL_LOW ? group_of(made->client, made->parent) : NULL;
    changed |= carries_kernels(into);
    if (changed)
        publish();
    pthread_mutex_unlock(&lock);
    tell(changed);
}

static void note_alloc(const void *argument, unsigned long request, int file)
{
    struct rm_alloc made = {0};
    if (_IOC_SIZE(request) == sizeof(struct rm_alloc)) {
        memcpy(&made, argument, sizeof(made));
    } else if (_IOC_SIZE(request) == sizeof(struct rm_alloc_short)) {
        const struct rm_alloc_short *from = argument;
        made = (struct rm_alloc){.client = from->client,
                                 .parent = from->parent,
                                 .object = from->object,
                                 .class_id = from->class_id,
                                 .status = from->status};
    }
    if (made.client != 0 && made.status == RM_OK)
        note_made(&made, file);
}

static void note_scheduled(const struct rm_control *made)
{
    if (made->status != RM_OK || (made->command != RM_SCHEDULE_GROUP && made->command != RM_SCHEDULE_CHANNEL))
        return;
    const struct rm_schedule *asked = (const struct rm_schedule *)(uintptr_t)made->parameters;
    if (asked == NULL || asked->enable == 0)
        return; /* a group that is no longer scheduled stays listed: it may be scheduled again */
    pthread_mutex_lock(&lock);
    bool changed = schedule_add(made);
    if (changed)
        publish();
    pthread_mutex_unlock(&lock);
    tell(changed);
}

/*
 * Returns whether the 8 bytes at `at` can be read. The kernel reads the set of signals before it refuses an unknown
 * `how`, so the call changes nothing.
 */
static bool is_readable(const void *at)
{
    return syscall(SYS_rt_sigprocmask, -1, at, NULL, sizeof(uint64_t)) != 0 && errno != EFAULT;
}

/*
 * Records that objects are freed. Called before the driver frees them, because their handles may be reused at once. So
 * the kernel has not checked `gone` yet, unlike the arguments of the other calls.
 */
static void note_free(const struct rm_free *gone)
{
    if (gone == NULL || !is_readable(&gone->client) || !is_readable(&gone->object))
        return;
    pthread_mutex_lock(&lock);
    bool changed = forget(gone->client, gone->object);
    if (changed)
        publish();
    pthread_mutex_unlock(&lock);
    tell(changed);
}

static int noted_ioctl(int fd, unsigned long request, void *argument)
{
    int before = errno;
    if (_IOC_NR(request) == RM_ESCAPE_FREE && _IOC_SIZE(request) == sizeof(struct rm_free))
        note_free(argument);
    errno = before; /* a call that succeeds leaves errno unchanged */
    int result = call_next(fd, request, argument);
    before = errno;
    if (result == 0 && _IOC_NR(request) == RM_ESCAPE_ALLOC && argument != NULL)
        note_alloc(argument, request, fd);
    if (result == 0 && _IOC_NR(request) == RM_ESCAPE_CONTROL && _IOC_SIZE(request) == sizeof(struct rm_control) &&
        argument != NULL)
        note_scheduled(argument);
    errno = before;
    return result;
}

VGPU_EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (__builtin_expect(_IOC_TYPE(request) == RM_IOCTL_TYPE, 0) &&
        (_IOC_NR(request) == RM_ESCAPE_ALLOC || _IOC_NR(request) == RM_ESCAPE_FREE ||
         _IOC_NR(request) == RM_ESCAPE_CONTROL) &&
        !__atomic_load_n(&ignored, __ATOMIC_RELAXED))
        return noted_ioctl(fd, request, argument);
    return call_next(fd, request, argument);
}

void vgpu_channels_start(int usage_fd, uint32_t slot)
{
    struct stat about;
    off_t at = (off_t)(VGPU_CHANNELS_AT + slot * sizeof(struct vgpu_channel_table));
    if (fstat(usage_fd, &about) != 0 || about.st_size < at + (off_t)sizeof(struct vgpu_channel_table))
        return; /* the lease was made by an older vgpud and has no tables */
    void *mapped = mmap(NULL, sizeof(struct vgpu_channel_table), PROT_READ | PROT_WRITE, MAP_SHARED, usage_fd, at);
    pthread_mutex_lock(&lock);
    table = mapped != MAP_FAILED ? mapped : NULL;
    if (table != NULL)
        /* the word `off` may still have the value of the slot's former owner */
        __atomic_store_n(&table->off, 0, __ATOMIC_SEQ_CST);
    publish();
    pthread_mutex_unlock(&lock);
}

void vgpu_channels_stays(const uint64_t by_kind[VGPU_STAY_KINDS])
{
    pthread_mutex_lock(&lock);
    for (unsigned kind = 0; table != NULL && kind < VGPU_STAY_KINDS; kind++)
        __atomic_store_n(&table->stays_mib[kind], (uint32_t)(by_kind[kind] >> 20), __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}

bool vgpu_channels_known(void)
{
    pthread_mutex_lock(&lock);
    bool known = table != NULL && table->count > 0 && table->lost == 0;
    pthread_mutex_unlock(&lock);
    return known;
}

void vgpu_channels_sample(bool unfinished, bool waits, uint32_t ms)
{
    pthread_mutex_lock(&lock);
    if (table != NULL) {
        __atomic_add_fetch(&table->waiting, waits ? ms : 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&table->unfinished, unfinished ? ms : 0, __ATOMIC_RELAXED);
        __atomic_add_fetch(&table->samples, ms, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
}

bool vgpu_channels_off(void)
{
    pthread_mutex_lock(&lock);
    bool off = table != NULL && __atomic_load_n(&table->off, __ATOMIC_RELAXED) != 0;
    pthread_mutex_unlock(&lock);
    return off;
}

/* Enables the channels of a group by one call of the driver. The call changes nothing if they are enabled already. */
static bool enable(const struct group *group)
{
    struct rm_disable_channels list = {.disable = 0, .count = group->count};
    const struct subdevice *subdevice = subdevice_of(group);
    struct rm_control control = {.client = group->client,
                                 .object = subdevice != NULL ? subdevice->object : 0,
                                 .command = RM_DISABLE_CHANNELS,
                                 .parameters = (uint64_t)(uintptr_t)&list,
                                 .parameters_size = sizeof(list)};
    for (uint32_t c = 0; c < group->count; c++) {
        list.clients[c] = group->client;
        list.channels[c] = group->channels[c];
    }
    return call_next(group->file, RM_REQUEST(RM_ESCAPE_CONTROL, struct rm_control), &control) == 0 &&
           control.status == RM_OK;
}

/*
 * Returns the bit of the group's device in `uuids`. If the device is not in `uuids` or not known, as in a move, returns
 * all bits.
 */
static uint32_t device_bit(const struct group *group, const uint8_t (*uuids)[16], uint32_t count)
{
    const struct subdevice *subdevice = subdevice_of(group);
    for (uint32_t d = 0; d < count && subdevice != NULL && subdevice->named; d++)
        if (memcmp(subdevice->uuid, uuids[d], sizeof(subdevice->uuid)) == 0)
            return 1u << d;
    return UINT32_MAX;
}

bool vgpu_channels_enable(const uint8_t (*uuids)[16], uint32_t count)
{
    bool all = true;
    pthread_mutex_lock(&lock);
    /*
     * `off` is cleared before the calls: a new arbiter may disable the channels at the same time, and its record must
     * stay
     */
    uint32_t off = table != NULL ? __atomic_exchange_n(&table->off, 0, __ATOMIC_SEQ_CST) : 0;
    for (uint32_t i = 0; i < groups_high && off != 0; i++) {
        const struct group *group = &groups[i];
        if (carries_kernels(group) && (off & device_bit(group, uuids, count)) != 0)
            all &= enable(group);
    }
    if (!all)
        __atomic_or_fetch(&table->off, off, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    return all;
}

void vgpu_channels_ignore(void)
{
    __atomic_store_n(&ignored, true, __ATOMIC_RELAXED);
}

/* Forgets the channels in a forked child, because they belong to the parent. */
static void reset_in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    memset(groups, 0, groups_high * sizeof(groups[0]));
    memset(subdevices, 0, sizeof(subdevices));
    groups_high = 0;
    lost = false;
    if (table != NULL)
        munmap(table, sizeof(*table));
    table = NULL;
    ignored = false;
}
VGPU_IN_CHILD(reset_in_child);
