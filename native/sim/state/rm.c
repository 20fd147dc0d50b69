/*
 * The driver's resource manager, as far as the simulator needs it: which process has which channels, and the call that
 * stops channels.
 *
 * Each open file of the control device may hold one client: a tree of objects (device, subdevice, channel group,
 * channel, compute object). The state file stands for the device. A lock of the open file description on one byte of
 * the state file, one byte for each process, says which process the file belongs to; a copy of the file (pidfd_getfd)
 * has the same description.
 *
 * Sources: numbers and structures are in common/rm.h. NVIDIA's open-gpu-kernel-modules 580.95.05 (client.c,
 * kernel_fifo_ctrl.c) require, for root too, that the client in a call's header belongs to the file, and do not check
 * the clients in the parameters of RM_DISABLE_CHANNELS. The call's effect and duration were measured on an H100, driver
 * 580.159.04: among others, that the driver counts how often a channel is disabled.
 */
#include "../../common/rm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define FIRST_CLIENT 0xc1d00000u
#define SPIN_NS 60000
#define FAULT "FIFO_DISABLE_CHANNELS" /* name of a fault that makes the call return the fault's code and do nothing */
/* names of the faults that delay a call before it changes its channels, and after it has changed them */
static const char *const fault_before[] = {"FIFO_DISABLE_CHANNELS.enables", "FIFO_DISABLE_CHANNELS.disables"};
static const char *const fault_after[] = {"FIFO_DISABLE_CHANNELS.enabled", "FIFO_DISABLE_CHANNELS.disabled"};
#define FAULT_LIE "FIFO_DISABLE_CHANNELS.lies" /* name of a fault that makes the call return 0 and do nothing */
enum { CLASS_ROOT_MAX = 1, CLASS_CLIENT = 0x41 };

bool sim_rm_is(struct sim_state *s, int fd)
{
    return s != NULL && sim_is_state_file(fd);
}

static struct sim_proc *client_of(struct sim_state *s, uint32_t client)
{
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; client != 0 && i < high; i++)
        if (atomic_load(&s->procs[i].used) && atomic_load(&s->procs[i].rm_client) == client)
            return &s->procs[i];
    return NULL;
}

/* Returns the client that a call names, if it was made through this file; otherwise NULL. */
static struct sim_proc *client_of_file(struct sim_state *s, int fd, uint32_t client)
{
    struct sim_proc *p = client_of(s, client);
    return p != NULL && !sim_rm_held_by_another(s, p, fd) ? p : NULL;
}

static struct sim_object *find(struct sim_proc *p, uint32_t handle)
{
    for (uint32_t i = 0; handle != 0 && i < p->object_high; i++)
        if (p->objects[i].handle == handle)
            return &p->objects[i];
    return NULL;
}

static bool is_channel(const struct sim_object *o)
{
    return (o->class_id & 0xff) == RM_CLASS_CHANNEL_LOW;
}

static bool is_compute(const struct sim_object *o)
{
    return (o->class_id & 0xff) == RM_CLASS_COMPUTE_LOW;
}

static struct sim_device *device_of(struct sim_state *s, const struct sim_proc *p, const struct sim_object *o)
{
    return &s->devices[p->uses[o->use].device];
}

/* Counts the channels of a use again, and stops or continues the use's queue accordingly. */
static void settle(struct sim_state *s, struct sim_proc *p, uint32_t use)
{
    struct sim_use *u = &p->uses[use];
    struct sim_device *d = &s->devices[u->device];
    uint32_t channels = 0, off = 0;
    for (uint32_t i = 0; i < p->object_high; i++) {
        const struct sim_object *o = &p->objects[i];
        if (o->handle == 0 || o->use != use || !o->computes)
            continue;
        channels++;
        off += o->off > 0 || o->unscheduled;
    }
    sim_engine_lock(d);
    sim_engine_advance(s, d, sim_engine_of(d, u->gi, u->ci));
    u->channels = channels;
    u->channels_off = off;
    sim_engine_channels(s, (uint32_t)(p - s->procs) * SIM_MAX_USES + use, u);
    sim_engine_unlock(d);
}

static bool fits(const struct sim_object *parent, uint32_t class_id)
{
    switch (class_id & 0xff) {
    case RM_CLASS_CHANNEL_LOW:
        return parent->class_id == RM_CLASS_CHANNEL_GROUP;
    case RM_CLASS_COMPUTE_LOW:
        return is_channel(parent);
    default:
        return (class_id == RM_CLASS_SUBDEVICE || class_id == RM_CLASS_CHANNEL_GROUP) &&
               parent->class_id == RM_CLASS_DEVICE;
    }
}

/* Marks the channels of the object's group as able to compute. */
static void mark_group(struct sim_proc *p, uint32_t group)
{
    for (uint32_t i = 0; i < p->object_high; i++)
        if (p->objects[i].handle != 0 && is_channel(&p->objects[i]) && p->objects[i].parent == group)
            p->objects[i].computes = 1;
}

static bool group_computes(const struct sim_proc *p, uint32_t group)
{
    for (uint32_t i = 0; i < p->object_high; i++)
        if (p->objects[i].handle != 0 && p->objects[i].parent == group && p->objects[i].computes)
            return true;
    return false;
}

static struct sim_object *take(struct sim_proc *p)
{
    for (uint32_t i = 0; i < p->object_high; i++)
        if (p->objects[i].handle == 0)
            return &p->objects[i];
    return p->object_high < SIM_MAX_OBJECTS ? &p->objects[p->object_high++] : NULL;
}

static uint32_t make_client(struct sim_state *s, int fd, struct rm_alloc *a)
{
    struct sim_proc *p = sim_proc_find(s, (uint32_t)getpid());
    if (p == NULL || sim_rm_held_by_another(s, p, fd) || atomic_load(&p->rm_client) != 0)
        return RM_INVALID_ARGUMENT;
    a->object = FIRST_CLIENT + ++s->rm_clients;
    atomic_store(&p->rm_client, a->object);
    return RM_OK;
}

/*
 * Makes an object of a client's tree. The parameters of a device object name the use; a client of the real driver names
 * the instance by a further object.
 */
static uint32_t make_object(struct sim_state *s, struct sim_proc *p, const struct rm_alloc *a)
{
    const struct sim_object *parent = find(p, a->parent);
    bool device = a->class_id == RM_CLASS_DEVICE && a->parent == a->client;
    const uint32_t *words = (const uint32_t *)(uintptr_t)a->parameters;
    if (a->object == 0 || find(p, a->object) != NULL || (device && (words == NULL || words[1] >= SIM_MAX_USES)))
        return RM_INVALID_ARGUMENT;
    if (!device && (parent == NULL || !fits(parent, a->class_id)))
        return RM_OBJECT_NOT_FOUND;
    struct sim_object made = {a->object, a->parent, a->class_id, (uint8_t)(device ? words[1] : parent->use), 0, 0, 0};
    uint32_t group = parent == NULL ? 0 : parent->parent;
    struct sim_object *o = take(p);
    if (o == NULL)
        return RM_INSUFFICIENT_RESOURCES;
    made.computes = is_channel(&made) && group_computes(p, made.parent);
    *o = made;
    if (is_compute(&made))
        mark_group(p, group);
    if (is_compute(&made) || made.computes)
        settle(s, p, made.use);
    return RM_OK;
}

static uint32_t alloc(struct sim_state *s, int fd, struct rm_alloc *a)
{
    if (a->class_id <= CLASS_ROOT_MAX || a->class_id == CLASS_CLIENT)
        return make_client(s, fd, a);
    struct sim_proc *p = client_of_file(s, fd, a->client);
    return p == NULL ? (uint32_t)RM_INVALID_CLIENT : make_object(s, p, a);
}

static void drop_below(struct sim_proc *p, uint32_t handle)
{
    for (uint32_t i = 0; i < p->object_high; i++) {
        struct sim_object *o = &p->objects[i];
        if (o->handle == 0 || (o->parent != handle && o->handle != handle))
            continue;
        uint32_t below = o->handle;
        o->handle = 0;
        if (below != handle)
            drop_below(p, below); /* the tree has at most five levels */
    }
}

static uint32_t drop(struct sim_state *s, int fd, const struct rm_free *f)
{
    struct sim_proc *p = client_of_file(s, fd, f->client);
    if (p == NULL)
        return RM_INVALID_CLIENT;
    if (f->object != f->client && find(p, f->object) == NULL)
        return RM_OBJECT_NOT_FOUND;
    drop_below(p, f->object);
    if (f->object == f->client)
        sim_rm_forget(p);
    for (uint32_t i = 0; i < SIM_MAX_USES; i++)
        if (p->uses[i].used && p->uses[i].channels > 0)
            settle(s, p, i);
    return RM_OK;
}

static void pass_until(uint64_t end_ns)
{
    for (uint64_t now = sim_now_ns(); now < end_ns; now = sim_now_ns()) {
        if (end_ns - now <= SPIN_NS)
            continue; /* spins: a sleep could end too late, because the kernel's timer slack is 50 us */
        uint64_t left = end_ns - now - SPIN_NS;
        struct timespec t = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
        nanosleep(&t, NULL);
    }
}

/*
 * Looks up every channel that the call names. Returns RM_INVALID_CHANNEL if one of them is unknown or on another
 * device. With `change` it sets each channel's state as it goes, so a call without `change` must have succeeded before.
 */
static uint32_t name_channels(struct sim_state *s, const struct sim_device *d, const struct rm_disable_channels *c,
                              bool change)
{
    for (uint32_t i = 0; i < c->count; i++) {
        struct sim_proc *p = client_of(s, c->clients[i]);
        struct sim_object *o = p == NULL ? NULL : find(p, c->channels[i]);
        if (o == NULL || !is_channel(o) || device_of(s, p, o) != d)
            return RM_INVALID_CHANNEL;
        if (change && c->disable != 0) {
            p->uses[o->use].channels_repeated += o->off > 0;
            o->off += o->off < UINT8_MAX;
        } else if (change) {
            o->off -= o->off > 0;
        }
    }
    for (uint32_t i = 0; change && i < c->count; i++) {
        struct sim_proc *p = client_of(s, c->clients[i]);
        if (i == 0 || c->clients[i] != c->clients[i - 1])
            for (uint32_t j = 0; j < SIM_MAX_USES; j++)
                if (p->uses[j].used && &s->devices[p->uses[j].device] == d)
                    settle(s, p, j);
    }
    return RM_OK;
}

static uint32_t locked_name_channels(struct sim_state *s, const struct sim_device *d,
                                     const struct rm_disable_channels *c, bool change)
{
    sim_lock(s);
    uint32_t status = name_channels(s, d, c, false); /* some channels may be gone: their processes ended meanwhile */
    if (status == RM_OK && change)
        status = name_channels(s, d, c, true);
    sim_unlock(s);
    return status;
}

static uint32_t disable(struct sim_state *s, struct sim_device *d, const struct rm_disable_channels *c)
{
    if (c->event != 0)
        return RM_INSUFFICIENT_PERMISSIONS;
    if (c->count > RM_DISABLE_CHANNELS_MAX)
        return RM_INVALID_ARGUMENT;
    int device = (int)(d - s->devices);
    int refused = sim_fault(s, FAULT, device);
    uint32_t status = refused != 0 ? (uint32_t)refused : locked_name_channels(s, d, c, false);
    if (status != RM_OK)
        return status;
    bool acts = (c->disable == 0 || c->only_scheduling == 0) && sim_fault(s, FAULT_LIE, device) == 0;
    sim_fault(s, fault_before[c->disable != 0], device);
    sim_rm_lock(d);
    uint64_t begin = sim_now_ns();
    pass_until(begin + (uint64_t)((c->disable ? d->channels_stop_us : d->channels_on_us) * 1e3));
    if (acts)
        status = locked_name_channels(s, d, c, true);
    if (c->disable)
        pass_until(begin + (uint64_t)(d->channels_off_us * 1e3));
    sim_rm_unlock(d);
    sim_fault(s, fault_after[c->disable != 0], device);
    return status;
}

static uint32_t get_gid(const struct sim_device *d, struct rm_gid *gid)
{
    unsigned digits = 0;
    if (gid->flags == RM_GID_BINARY) {
        memset(gid->data, 0, sizeof(gid->data));
        for (const char *c = d->uuid + strlen("GPU-"); *c != '\0' && digits < 32; c++)
            if (*c != '-') {
                unsigned value = (unsigned)(*c <= '9' ? *c - '0' : *c - 'a' + 10);
                gid->data[digits / 2] = (uint8_t)(gid->data[digits / 2] | value << (digits % 2 == 0 ? 4 : 0));
                digits++;
            }
        gid->length = 16;
        return RM_OK;
    }
    if (gid->flags != RM_GID_TEXT)
        return RM_NOT_SUPPORTED;
    gid->length = (uint32_t)snprintf((char *)gid->data, sizeof(gid->data), "%s", d->uuid) + 1;
    return RM_OK;
}

/* Returns the device of the subdevice that a call names; NULL, with *status set, if there is none. */
static struct sim_device *find_device(struct sim_state *s, int fd, const struct rm_control *c, uint32_t *status)
{
    struct sim_device *d = NULL;
    sim_lock(s);
    sim_sweep(s);
    struct sim_proc *p = client_of_file(s, fd, c->client);
    const struct sim_object *o = p == NULL ? NULL : find(p, c->object);
    if (o != NULL && o->class_id == RM_CLASS_SUBDEVICE)
        d = device_of(s, p, o);
    *status = p == NULL ? RM_INVALID_CLIENT : RM_OBJECT_NOT_FOUND;
    sim_unlock(s);
    return d;
}

/*
 * Schedules a channel group, which enables its channels, however often they were disabled (as on an H100). Without
 * `enable`, its channels stand until the group is scheduled again (ctrla06fgpfifo.h).
 */
static uint32_t schedule(struct sim_state *s, struct sim_proc *p, const struct rm_control *c)
{
    const struct sim_object *group = p == NULL ? NULL : find(p, c->object);
    if (p == NULL)
        return RM_INVALID_CLIENT;
    if (group == NULL || group->class_id != RM_CLASS_CHANNEL_GROUP)
        return RM_OBJECT_NOT_FOUND;
    if (c->parameters == 0 || c->parameters_size != sizeof(struct rm_schedule))
        return RM_INVALID_ARGUMENT;
    bool enable = ((const struct rm_schedule *)(uintptr_t)c->parameters)->enable != 0;
    for (uint32_t i = 0; i < p->object_high; i++)
        if (p->objects[i].handle != 0 && p->objects[i].parent == c->object) {
            p->objects[i].off = enable ? 0 : p->objects[i].off;
            p->objects[i].unscheduled = !enable;
        }
    settle(s, p, group->use);
    return RM_OK;
}

static uint32_t control(struct sim_state *s, int fd, const struct rm_control *c)
{
    uint32_t status = RM_OK;
    if (c->command == RM_SCHEDULE_GROUP) {
        sim_lock(s);
        status = schedule(s, client_of_file(s, fd, c->client), c);
        sim_unlock(s);
        return status;
    }
    struct sim_device *d = find_device(s, fd, c, &status);
    void *parameters = (void *)(uintptr_t)c->parameters;
    size_t size = c->command == RM_DISABLE_CHANNELS ? sizeof(struct rm_disable_channels) : sizeof(struct rm_gid);
    if (d == NULL)
        return status;
    if (c->command != RM_DISABLE_CHANNELS && c->command != RM_GET_GID)
        return RM_NOT_SUPPORTED;
    if (parameters == NULL || c->parameters_size != size)
        return RM_INVALID_ARGUMENT;
    return c->command == RM_GET_GID ? get_gid(d, parameters) : disable(s, d, parameters);
}

static int alloc_in_either_length(struct sim_state *s, int fd, size_t size, void *argument)
{
    struct rm_alloc *a = argument, long_one = {.client = 0};
    struct rm_alloc_short *b = argument;
    if (size == sizeof(*b)) {
        memcpy(&long_one, b, offsetof(struct rm_alloc_short, parameters_size));
        a = &long_one;
    }
    sim_lock(s);
    a->status = alloc(s, fd, a);
    sim_unlock(s);
    if (size == sizeof(*b)) {
        b->object = a->object;
        b->status = a->status;
    }
    return 0;
}

int sim_rm_ioctl(struct sim_state *s, int fd, unsigned long request, void *argument)
{
    size_t size = _IOC_SIZE(request);
    uint32_t number = _IOC_NR(request);
    if (number == RM_ESCAPE_ALLOC && (size == sizeof(struct rm_alloc) || size == sizeof(struct rm_alloc_short)))
        return alloc_in_either_length(s, fd, size, argument);
    if (number == RM_ESCAPE_FREE && size == sizeof(struct rm_free)) {
        struct rm_free *f = argument;
        sim_lock(s);
        f->status = drop(s, fd, f);
        sim_unlock(s);
        return 0;
    }
    if (number == RM_ESCAPE_CONTROL && size == sizeof(struct rm_control)) {
        struct rm_control *c = argument;
        c->status = control(s, fd, c);
        return 0;
    }
    errno = EINVAL;
    return -1;
}
