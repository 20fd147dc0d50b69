/* Prints the node's state as JSON, for `vgpu-sim state`. */
#include "dump.h"

#include <stdio.h>

#include "../../common/rm.h"

/* Prints the handles of the subdevice and of the channels that can compute. */
static void print_channels(const struct sim_proc *p, uint32_t use)
{
    uint32_t subdevice = 0;
    const char *comma = "";
    printf(",\"compute_channels\":[");
    for (uint32_t i = 0; i < p->object_high; i++) {
        const struct sim_object *o = &p->objects[i];
        if (o->handle == 0 || o->use != use)
            continue;
        if (o->class_id == RM_CLASS_SUBDEVICE)
            subdevice = o->handle;
        if (o->computes) {
            printf("%s%u", comma, o->handle);
            comma = ",";
        }
    }
    printf("],\"subdevice\":%u", subdevice);
}

static void print_uses(struct sim_state *s, const struct sim_proc *p)
{
    const char *comma = "";
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        const struct sim_use *u = &p->uses[i];
        if (!u->used)
            continue;
        printf("%s{\"device\":%u,\"gi\":%d,\"ci\":%d,\"contexts\":%u,\"mps\":%u,"
               "\"mps_fraction\":%g,\"bytes\":%llu,\"context_bytes\":%llu,\"managed_bytes\":%llu,"
               "\"submitted_ns\":%.0f,\"done_ns\":%.0f,\"channels\":%u,\"channels_off\":%u,\"channels_repeated\":%u",
               comma, u->device, u->gi, u->ci, u->contexts, u->mps, u->mps_fraction,
               (unsigned long long)sim_use_bytes(u), (unsigned long long)u->bytes[SIM_CONTEXT],
               (unsigned long long)u->bytes[SIM_MANAGED], u->queue.submitted, u->queue.done, u->channels,
               u->channels_off, u->channels_repeated);
        print_channels(p, i);
        printf("}");
        comma = ",";
    }
    (void)s;
}

static void print_instances(const struct sim_device *d)
{
    const char *comma = "";
    for (uint32_t gi = 0; gi < SIM_MAX_GIS; gi++) {
        const struct sim_gi *g = &d->gis[gi];
        if (!g->used)
            continue;
        printf("%s{\"id\":%u,\"profile_id\":%u,\"profile\":\"%s\",\"start\":%u,\"size\":%u,"
               "\"compute_instances\":[",
               comma, gi, d->gi_profiles[g->profile].id, d->gi_profiles[g->profile].name, g->placement.start,
               g->placement.size);
        const char *inner = "";
        for (uint32_t ci = 0; ci < SIM_MAX_CIS; ci++) {
            char uuid[48];
            if (!g->cis[ci].used)
                continue;
            sim_mig_uuid(d, gi, ci, uuid);
            printf("%s{\"id\":%u,\"sm_count\":%u,\"uuid\":\"%s\"}", inner, ci, g->cis[ci].sm_count, uuid);
            inner = ",";
        }
        printf("]}");
        comma = ",";
    }
}

static void print_device(struct sim_state *s, uint32_t i)
{
    struct sim_device *d = &s->devices[i];
    printf("{\"index\":%u,\"uuid\":\"%s\",\"name\":\"%s\",\"memory_total\":%llu,"
           "\"memory_reserved\":%llu,\"memory_used\":%llu,\"hidden_bytes\":%llu,"
           "\"compute_mode\":%u,\"mig_current\":%u,\"mig_pending\":%u,\"lost\":%u,"
           "\"busy_ns\":%.0f,\"gpu_instances\":[",
           i, d->uuid, d->name, (unsigned long long)d->memory_total, (unsigned long long)d->memory_reserved,
           (unsigned long long)sim_used_bytes(s, i, SIM_NONE), (unsigned long long)d->hidden_bytes, d->compute_mode,
           d->mig_current, d->mig_pending, d->lost, d->whole.busy_ns_total);
    print_instances(d);
    printf("]}");
}

/* Brings the engines up to the present: an engine advances only when it is read. */
static void advance(struct sim_state *s, struct sim_device *d)
{
    sim_engine_lock(d);
    sim_engine_advance(s, d, &d->whole);
    for (uint32_t g = 0; g < SIM_MAX_GIS; g++)
        for (uint32_t c = 0; d->gis[g].used && c < SIM_MAX_CIS; c++)
            if (d->gis[g].cis[c].used)
                sim_engine_advance(s, d, &d->mig_engines[g][c]);
    sim_engine_unlock(d);
}

void sim_dump(struct sim_state *s)
{
    sim_lock(s);
    sim_sweep(s);
    for (uint32_t i = 0; i < s->device_count; i++)
        advance(s, &s->devices[i]);
    printf("{\"profile\":\"%s\",\"driver_version\":\"%s\",\"boot_count\":%llu,\"devices\":[", s->profile,
           s->driver_version, (unsigned long long)s->boot_count);
    for (uint32_t i = 0; i < s->device_count; i++) {
        printf(i == 0 ? "" : ",");
        print_device(s, i);
    }
    printf("],\"processes\":[");
    const char *comma = "";
    for (uint32_t i = 0; i < SIM_MAX_PROCS; i++) {
        const struct sim_proc *p = &s->procs[i];
        if (!atomic_load(&p->used))
            continue;
        static const char *const gates[] = {"running", "locked", "checkpointed", "failed"};
        printf("%s{\"pid\":%u,\"state\":\"%s\",\"client\":%u,\"uses\":[", comma, p->pid,
               gates[sim_gate_of(atomic_load(&p->gate))], atomic_load(&p->rm_client));
        print_uses(s, p);
        printf("]}");
        comma = ",";
    }
    printf("],\"walls\":[");
    comma = "";
    for (uint32_t i = 0; i < SIM_MAX_WALLS; i++) {
        const struct sim_wall *w = &s->walls[i];
        struct sim_wall now;
        uint64_t used;
        if (!w->used || sim_wall_get(s, w->device, w->path, &now, &used) != 0 || now.inode != w->inode)
            continue;
        printf("%s{\"device\":%u,\"path\":\"%s\",\"hard\":%llu,\"used\":%llu}", comma, w->device, w->path,
               (unsigned long long)now.hard, (unsigned long long)used);
        comma = ",";
    }
    printf("],\"faults\":[");
    comma = "";
    for (uint32_t i = 0; i < SIM_MAX_FAULTS; i++) {
        const struct sim_fault *f = &s->faults[i];
        if (!f->used)
            continue;
        printf("%s{\"function\":\"%s\",\"action\":%u,\"code\":%u,\"remaining\":%d,\"delay_us\":%u}", comma, f->function,
               f->action, f->code, f->remaining, f->delay_us);
        comma = ",";
    }
    printf("]}\n");
    sim_unlock(s);
}
