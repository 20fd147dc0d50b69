/* MIG in the simulator: possible placements, and the settings that survive a reset or a reboot. */
#include "state.h"

#include <nvml.h>
#include <stdio.h>
#include <string.h>

const struct sim_gi_profile *sim_gi_profile_by_id(const struct sim_device *d, uint32_t id)
{
    for (uint32_t i = 0; i < d->gi_profile_count; i++)
        if (d->gi_profiles[i].id == id)
            return &d->gi_profiles[i];
    return NULL;
}

static bool overlaps(const struct sim_device *d, const struct sim_placement *at)
{
    for (uint32_t i = 0; i < SIM_MAX_GIS; i++) {
        const struct sim_gi *g = &d->gis[i];
        if (g->used && at->start < g->placement.start + g->placement.size && g->placement.start < at->start + at->size)
            return true;
    }
    return false;
}

static uint32_t count_of(const struct sim_device *d, const struct sim_gi_profile *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < SIM_MAX_GIS; i++)
        n += d->gis[i].used && d->gis[i].profile == (uint32_t)(p - d->gi_profiles);
    return n;
}

uint32_t sim_gi_remaining(const struct sim_device *d, const struct sim_gi_profile *p)
{
    uint32_t left = p->instance_count - count_of(d, p), free_places = 0;
    for (uint32_t i = 0; i < p->placement_count; i++) /* the placements of one profile never overlap */
        free_places += !overlaps(d, &p->placements[i]);
    return free_places < left ? free_places : left;
}

static bool is_place_of(const struct sim_gi_profile *p, const struct sim_placement *at)
{
    for (uint32_t i = 0; i < p->placement_count; i++)
        if (p->placements[i].start == at->start && p->placements[i].size == at->size)
            return true;
    return false;
}

/* Chooses a placement if the caller names none: the driver fills a device from the high end (NVIDIA's MIG guide). */
static bool choose_place(const struct sim_device *d, const struct sim_gi_profile *p, struct sim_placement *at)
{
    for (uint32_t i = p->placement_count; i > 0; i--) {
        if (!overlaps(d, &p->placements[i - 1])) {
            *at = p->placements[i - 1];
            return true;
        }
    }
    return false;
}

/*
 * Numbers GPU instances as the driver does: 0 for the whole device, 1-2 for halves, then 3-6 and 7-14 (with 8 slices).
 */
static uint32_t id_of_place(const struct sim_device *d, const struct sim_placement *at)
{
    return d->memory_slices / at->size - 1 + at->start / at->size;
}

int sim_gi_create(struct sim_state *s, uint32_t device, uint32_t profile_id, const struct sim_placement *at,
                  uint32_t *gi)
{
    struct sim_device *d = &s->devices[device];
    const struct sim_gi_profile *p = sim_gi_profile_by_id(d, profile_id);
    if (!d->mig_capable || !d->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    if (p == NULL || (at != NULL && !is_place_of(p, at)))
        return NVML_ERROR_INVALID_ARGUMENT;
    struct sim_placement place = {0, 0};
    if (sim_gi_remaining(d, p) == 0)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    if (at != NULL ? overlaps(d, at) : !choose_place(d, p, &place))
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    if (at != NULL)
        place = *at;
    uint32_t id = id_of_place(d, &place);
    struct sim_gi *g = &d->gis[id];
    memset(g, 0, sizeof(*g));
    g->profile = (uint32_t)(p - d->gi_profiles);
    g->placement = place;
    g->minor = s->caps_minor_base + d->minor * 135 + id * 9;
    __atomic_store_n(&g->used, 1, __ATOMIC_RELEASE);
    *gi = id;
    sim_tree_gi(s, device, id);
    sim_post_event(s, device, (int)id, SIM_NONE, nvmlEventMigConfigChange, 0);
    return NVML_SUCCESS;
}

int sim_gi_destroy(struct sim_state *s, uint32_t device, uint32_t gi)
{
    struct sim_gi *g = &s->devices[device].gis[gi];
    if (!g->used)
        return NVML_ERROR_NOT_FOUND;
    for (uint32_t i = 0; i < SIM_MAX_CIS; i++)
        if (g->cis[i].used)
            return NVML_ERROR_IN_USE;
    if (sim_in_use(s, device, (int)gi, SIM_NONE))
        return NVML_ERROR_IN_USE;
    __atomic_store_n(&g->used, 0, __ATOMIC_RELEASE);
    sim_tree_gi(s, device, gi);
    sim_post_event(s, device, (int)gi, SIM_NONE, nvmlEventMigConfigChange, 0);
    return NVML_SUCCESS;
}

/*
 * Derives the compute profile with this NVML profile number. A compute instance of n slices fits N / n times into a GPU
 * instance of N slices. The largest one has all SMs; a smaller one has its slices' SMs only.
 */
bool sim_ci_profile(const struct sim_device *d, const struct sim_gi *g, uint32_t nvml_profile,
                    struct sim_ci_profile *out)
{
    static const uint32_t slices_of[] = {1, 2, 3, 4, 7, 8, 6};
    const struct sim_gi_profile *p = &d->gi_profiles[g->profile];
    if (nvml_profile >= sizeof(slices_of) / sizeof(slices_of[0]))
        return false;
    uint32_t n = slices_of[nvml_profile];
    if (n > p->slice_count)
        return false;
    memset(out, 0, sizeof(*out));
    out->id = nvml_profile;
    out->slice_count = n;
    out->instance_count = p->slice_count / n;
    out->sm_count = n == p->slice_count ? p->sm_count : n * d->sm_per_slice;
    const char *size = strncmp(p->name, "MIG ", 4) == 0 ? p->name + 4 : p->name;
    if (n == p->slice_count)
        snprintf(out->name, sizeof(out->name), "MIG %.50s", size);
    else
        snprintf(out->name, sizeof(out->name), "MIG %uc.%.50s", n, size);
    return true;
}

uint32_t sim_ci_placements(const struct sim_gi_profile *p, uint32_t slices, uint32_t *starts)
{
    uint32_t step = slices == 3 ? 4 : slices, n = 0; /* an instance of three slices occupies the place of four */
    for (uint32_t start = 0; start + slices <= p->slice_count; start += step)
        starts[n++] = start;
    return n;
}

static bool ci_overlaps(const struct sim_gi *g, uint32_t start, uint32_t size)
{
    for (uint32_t i = 0; i < SIM_MAX_CIS; i++) {
        const struct sim_ci *c = &g->cis[i];
        if (c->used && start < c->start + c->slice_count && c->start < start + size)
            return true;
    }
    return false;
}

uint32_t sim_ci_remaining(const struct sim_device *d, const struct sim_gi *g, const struct sim_ci_profile *c)
{
    uint32_t starts[SIM_MAX_CIS], n = 0;
    uint32_t count = sim_ci_placements(&d->gi_profiles[g->profile], c->slice_count, starts);
    for (uint32_t i = 0; i < count; i++)
        n += !ci_overlaps(g, starts[i], c->slice_count);
    return n;
}

static int ci_place(const struct sim_device *d, const struct sim_gi *g, uint32_t slices, const struct sim_placement *at,
                    uint32_t *start)
{
    uint32_t starts[SIM_MAX_CIS];
    uint32_t count = sim_ci_placements(&d->gi_profiles[g->profile], slices, starts);
    for (uint32_t i = 0; i < count; i++) {
        if (at != NULL && (at->start != starts[i] || at->size != slices))
            continue;
        if (!ci_overlaps(g, starts[i], slices)) {
            *start = starts[i];
            return NVML_SUCCESS;
        }
        if (at != NULL)
            return NVML_ERROR_INSUFFICIENT_RESOURCES;
    }
    return at != NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

int sim_ci_create(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci_profile_id,
                  const struct sim_placement *at, uint32_t *ci)
{
    struct sim_device *d = &s->devices[device];
    struct sim_gi *g = &d->gis[gi];
    struct sim_ci_profile p;
    if (!g->used)
        return NVML_ERROR_NOT_FOUND;
    if (!sim_ci_profile(d, g, ci_profile_id, &p))
        return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t start = 0, id = 0;
    int ret = ci_place(d, g, p.slice_count, at, &start);
    if (ret != NVML_SUCCESS)
        return ret;
    while (id < SIM_MAX_CIS && g->cis[id].used)
        id++;
    if (id == SIM_MAX_CIS)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    struct sim_ci *c = &g->cis[id];
    *c = (struct sim_ci){.profile = ci_profile_id,
                         .slice_count = p.slice_count,
                         .sm_count = p.sm_count,
                         .start = start,
                         .minor = g->minor + 1 + id};
    __atomic_store_n(&c->used, 1, __ATOMIC_RELEASE);
    *ci = id;
    sim_tree_ci(s, device, gi, id);
    sim_post_event(s, device, (int)gi, (int)id, nvmlEventMigConfigChange, 0);
    return NVML_SUCCESS;
}

int sim_ci_destroy(struct sim_state *s, uint32_t device, uint32_t gi, uint32_t ci)
{
    struct sim_gi *g = &s->devices[device].gis[gi];
    if (!g->used || !g->cis[ci].used)
        return NVML_ERROR_NOT_FOUND;
    if (sim_in_use(s, device, (int)gi, (int)ci))
        return NVML_ERROR_IN_USE;
    __atomic_store_n(&g->cis[ci].used, 0, __ATOMIC_RELEASE);
    sim_tree_ci(s, device, gi, ci);
    sim_post_event(s, device, (int)gi, (int)ci, nvmlEventMigConfigChange, 0);
    return NVML_SUCCESS;
}

static bool has_instances(const struct sim_device *d)
{
    for (uint32_t i = 0; i < SIM_MAX_GIS; i++)
        if (d->gis[i].used)
            return true;
    return false;
}

/*
 * Sets the MIG mode with NVML's two results: the function returns whether the request was accepted, and *activation
 * says whether the mode is active (RESET_REQUIRED on Ampere, IN_USE while processes hold the device).
 */
int sim_mig_set_mode(struct sim_state *s, uint32_t device, uint32_t mode, int *activation)
{
    struct sim_device *d = &s->devices[device];
    *activation = NVML_SUCCESS;
    if (!d->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    if (d->mig_current == mode) {
        d->mig_pending = mode;
        return NVML_SUCCESS;
    }
    if (has_instances(d)) {
        *activation = NVML_ERROR_IN_USE;
        return NVML_ERROR_IN_USE;
    }
    d->mig_pending = mode;
    if (d->mig_needs_reset)
        *activation = NVML_ERROR_RESET_REQUIRED;
    else if (sim_in_use(s, device, SIM_NONE, SIM_NONE))
        *activation = NVML_ERROR_IN_USE;
    else
        d->mig_current = mode;
    sim_post_event(s, device, SIM_NONE, SIM_NONE, nvmlEventMigConfigChange, 0);
    return NVML_SUCCESS;
}

static uint64_t mix(uint64_t h, const char *text)
{
    for (; *text != '\0'; text++)
        h = (h ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    h ^= h >> 29;
    return h * UINT64_C(0xbf58476d1ce4e5b9);
}

/* Derives the UUID of a MIG device. The same instance of the same device always has the same UUID, as on hardware. */
void sim_mig_uuid(const struct sim_device *d, uint32_t gi, uint32_t ci, char out[48])
{
    char key[96];
    snprintf(key, sizeof(key), "%s/%u/%u", d->uuid, gi, ci);
    uint64_t a = mix(UINT64_C(0xcbf29ce484222325), key);
    uint64_t b = mix(a, key);
    snprintf(out, 48, "MIG-%08x-%04x-5%03x-%04x-%012llx", (uint32_t)(a >> 32), (uint32_t)(a >> 16) & 0xffff,
             (uint32_t)a & 0xfff, ((uint32_t)(b >> 48) & 0x3fff) | 0x8000,
             (unsigned long long)(b & UINT64_C(0xffffffffffff)));
}

static void drop_instances(struct sim_state *s, uint32_t device)
{
    struct sim_device *d = &s->devices[device];
    for (uint32_t gi = 0; gi < SIM_MAX_GIS; gi++) {
        if (!d->gis[gi].used)
            continue;
        for (uint32_t ci = 0; ci < SIM_MAX_CIS; ci++) {
            d->gis[gi].cis[ci].used = 0;
            sim_tree_ci(s, device, gi, ci);
        }
        d->gis[gi].used = 0;
        sim_tree_gi(s, device, gi);
    }
}

void sim_device_reset(struct sim_state *s, uint32_t device)
{
    struct sim_device *d = &s->devices[device];
    drop_instances(s, device);
    d->mig_current = d->mig_pending;
    d->lost = 0;
    d->hidden_bytes = 0;
    d->recovery_action = d->banks_pending = 0;
    d->rows_remapped += d->rows_pending;
    d->rows_pending = 0;
}

void sim_reboot(struct sim_state *s)
{
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++)
        if (atomic_load(&s->procs[i].used))
            sim_proc_release(s, &s->procs[i]);
    for (uint32_t i = 0; i < s->device_count; i++) {
        struct sim_device *d = &s->devices[i];
        sim_device_reset(s, i);
        if (!d->mig_persists_reboot)
            d->mig_current = d->mig_pending = 0;
        d->compute_mode = 0;
        d->accounting = 0;
        d->persistence = 0;
    }
    s->boot_count++;
}
