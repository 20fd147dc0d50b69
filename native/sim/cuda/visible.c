/*
 * The devices that this process sees: CUDA_VISIBLE_DEVICES, and the rules for MIG.
 *
 * If the node has a compute instance, CUDA sees no card without MIG. Without CUDA_VISIBLE_DEVICES it sees the first
 * instance; from branch 570 on it sees as many instances as are listed (NVIDIA's MIG guide). A client of MPS sees its
 * daemon's devices with the daemon's numbers, and its own list counts within them.
 */
#include "internal.h"

static void add(uint32_t device, int gi, int ci)
{
    for (int i = 0; i < cu.device_count; i++)
        if (cu.devices[i].device == device && cu.devices[i].gi == gi && cu.devices[i].ci == ci)
            return;
    if (cu.device_count < CU_MAX_ORDINALS)
        cu.devices[cu.device_count++] = (struct cu_device){.card = device, .device = device, .gi = gi, .ci = ci};
}

typedef bool (*instance_visitor)(uint32_t device, uint32_t gi, uint32_t ci, const char *word);

/* Calls `visit` for the compute instances of `device` until `visit` accepts one. */
static bool each_instance(uint32_t device, instance_visitor visit, const char *word)
{
    const struct sim_device *d = &cu.s->devices[device];
    for (uint32_t g = 0; d->mig_current && g < SIM_MAX_GIS; g++)
        for (uint32_t c = 0; d->gis[g].used && c < SIM_MAX_CIS; c++)
            if (d->gis[g].cis[c].used && visit(device, g, c, word))
                return true;
    return false;
}

static bool take_any(uint32_t device, uint32_t gi, uint32_t ci, const char *word)
{
    (void)word;
    add(device, (int)gi, (int)ci);
    return true;
}

static bool take_named(uint32_t device, uint32_t gi, uint32_t ci, const char *word)
{
    char uuid[48];
    sim_mig_uuid(&cu.s->devices[device], gi, ci, uuid);
    if (strncmp(uuid, word, strlen(word)) != 0)
        return false;
    add(device, (int)gi, (int)ci);
    return true;
}

static bool take_card(uint32_t device)
{
    const struct sim_device *d = &cu.s->devices[device];
    if (d->lost)
        return false;
    if (d->mig_current)
        return each_instance(device, take_any, NULL);
    add(device, SIM_NONE, SIM_NONE);
    return true;
}

/* Adds the device whose UUID begins with `word`, if exactly one device's does. */
static bool take_uuid(const char *word)
{
    uint32_t hit = 0, hits = 0;
    for (uint32_t i = 0; i < cu.s->device_count; i++) {
        if (strncmp(cu.s->devices[i].uuid, word, strlen(word)) == 0) {
            hit = i;
            hits++;
        }
    }
    return hits == 1 && take_card(hit);
}

/* "MIG-GPU-uuid/gi/ci": the form before branch 470. */
static bool take_old_mig(const char *word)
{
    unsigned gi, ci;
    for (uint32_t i = 0; i < cu.s->device_count; i++) {
        const struct sim_device *d = &cu.s->devices[i];
        size_t n = strlen(d->uuid);
        if (strncmp(word + 4, d->uuid, n) == 0 && sscanf(word + 4 + n, "/%u/%u", &gi, &ci) == 2 && gi < SIM_MAX_GIS &&
            ci < SIM_MAX_CIS && d->gis[gi].used && d->gis[gi].cis[ci].used) {
            add(i, (int)gi, (int)ci);
            return true;
        }
    }
    return false;
}

static bool take_word(const char *word)
{
    unsigned long long index;
    if (strncmp(word, "GPU-", 4) == 0 && strlen(word) > 4)
        return take_uuid(word);
    if (strncmp(word, "MIG-GPU-", 8) == 0)
        return take_old_mig(word);
    if (strncmp(word, "MIG-", 4) == 0) {
        for (uint32_t i = 0; i < cu.s->device_count; i++)
            if (each_instance(i, take_named, word))
                return true;
        return false;
    }
    return sim_parse_unsigned(word, &index) && index < cu.s->device_count && take_card((uint32_t)index);
}

static void keep_instances_only(void)
{
    int kept = 0, limit = sim_branch(cu.s) >= 570 ? CU_MAX_ORDINALS : 1;
    bool any = false;
    for (int i = 0; i < cu.device_count; i++)
        any = any || cu.devices[i].gi != SIM_NONE;
    if (!any)
        return;
    for (int i = 0; i < cu.device_count && kept < limit; i++)
        if (cu.devices[i].gi != SIM_NONE)
            cu.devices[kept++] = cu.devices[i];
    cu.device_count = kept;
}

static void take_list(const char *list)
{
    char text[2048];
    snprintf(text, sizeof(text), "%s", list);
    char *rest = text, *word;
    while ((word = strsep(&rest, ",")) != NULL) {
        word += strspn(word, " ");
        word[strcspn(word, " ")] = '\0';
        if (!take_word(word))
            break; /* entries after an invalid one are ignored, as by the driver */
    }
}

static void take_all(void)
{
    for (uint32_t i = 0; i < cu.s->device_count; i++)
        take_card(i);
    keep_instances_only();
    if (cu.device_count > 0 && cu.devices[0].gi != SIM_NONE)
        cu.device_count = 1;
}

/*
 * Chooses from the offered devices those that the process's own list names, in the list's order, up to the first word
 * that names no offered device.
 */
static void choose(const struct cu_device *offered, int count, const char *list)
{
    char text[2048];
    snprintf(text, sizeof(text), "%s", list);
    char *rest = text, *word;
    cu.device_count = 0;
    while ((word = strsep(&rest, ",")) != NULL) {
        unsigned long long index;
        int before = cu.device_count;
        if (sim_parse_unsigned(word, &index)) {
            if (index < (unsigned)count)
                add(offered[index].card, offered[index].gi, offered[index].ci);
        } else if (take_word(word)) {
            const struct cu_device *got = &cu.devices[cu.device_count - 1];
            bool known = false;
            for (int i = 0; i < count; i++)
                known = known || (offered[i].card == got->card && offered[i].gi == got->gi && offered[i].ci == got->ci);
            cu.device_count = known ? cu.device_count : before;
        }
        if (cu.device_count == before)
            break;
    }
}

CUresult cu_find_devices(const char *offered)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    cu.device_count = 0;
    if (offered == NULL && list == NULL)
        take_all();
    else
        take_list(offered != NULL ? offered : list);
    keep_instances_only();
    if (offered != NULL && list != NULL) {
        static struct cu_device of_daemon[CU_MAX_ORDINALS];
        memcpy(of_daemon, cu.devices, sizeof(of_daemon));
        choose(of_daemon, cu.device_count, list);
    }
    return CUDA_SUCCESS;
}
