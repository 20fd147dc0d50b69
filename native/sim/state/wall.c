/*
 * Memory limits of control groups, as in drivers from branch 615 on (NVML's nvmlDeviceSetMemoryLimits_v1). The limit of
 * a group holds for all processes in the group and below it together, and ends with the group (nvml.h of branch 615:
 * "Removing the cgroup will also clear any limits"). The simulator assumes that a process's memory counts in the group
 * that the process is in now.
 */
#include <nvml.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "state.h"

static const char *const mounts[] = {"/sys/fs/cgroup/unified/", "/sys/fs/cgroup/"};

/*
 * Returns the group's path below the mount of cgroup v2, with a leading slash; NULL if the path is not below the mount.
 */
static const char *below_mount(const char *path)
{
    for (size_t i = 0; i < sizeof(mounts) / sizeof(mounts[0]); i++)
        if (strncmp(path, mounts[i], strlen(mounts[i])) == 0)
            return path + strlen(mounts[i]) - 1;
    return NULL;
}

static uint64_t inode_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? (uint64_t)st.st_ino : 0;
}

static bool stands(const struct sim_wall *w)
{
    return w->used && inode_of(w->path) == w->inode;
}

static bool read_group(uint32_t pid, char group[SIM_GROUP_PATH])
{
    char path[40], line[SIM_GROUP_PATH + 3];
    bool found = false;
    snprintf(path, sizeof(path), "/proc/%u/cgroup", pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, "0::", 3) == 0) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(group, SIM_GROUP_PATH, "%s", line + 3);
            found = true;
        }
    fclose(f);
    return found;
}

static bool holds(const struct sim_wall *w, const char *group)
{
    const char *wall = below_mount(w->path);
    size_t n = strlen(wall);
    return strncmp(wall, group, n) == 0 && (group[n] == '\0' || group[n] == '/');
}

static uint64_t used_behind(struct sim_state *s, const struct sim_wall *w)
{
    char group[SIM_GROUP_PATH];
    uint64_t sum = 0;
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_proc *p = &s->procs[i];
        if (!sim_proc_holds(p))
            continue;
        struct sim_use *u = sim_use_find(p, w->device, SIM_NONE, SIM_NONE);
        if (u != NULL && read_group(p->pid, group) && holds(w, group))
            sum += sim_use_bytes(u);
    }
    return sum;
}

static struct sim_wall *find(struct sim_state *s, uint32_t device, const char *path)
{
    for (uint32_t i = 0; i < SIM_MAX_WALLS; i++)
        if (s->walls[i].device == device && strcmp(s->walls[i].path, path) == 0 && stands(&s->walls[i]))
            return &s->walls[i];
    return NULL;
}

int sim_wall_set(struct sim_state *s, uint32_t device, const char *path, uint64_t soft, uint64_t hard)
{
    if (strlen(path) >= SIM_GROUP_PATH || below_mount(path) == NULL || soft > hard)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t inode = inode_of(path);
    if (inode == 0)
        return NVML_ERROR_NOT_FOUND;
    struct sim_wall *w = find(s, device, path);
    for (uint32_t i = 0; w == NULL && i < SIM_MAX_WALLS; i++)
        if (!stands(&s->walls[i]))
            w = &s->walls[i];
    if (w == NULL)
        return NVML_ERROR_INSUFFICIENT_RESOURCES;
    *w = (struct sim_wall){.used = soft != 0 || hard != SIM_NO_LIMIT, device, inode, soft, hard, ""};
    snprintf(w->path, sizeof(w->path), "%s", path);
    atomic_store(&s->has_walls, 1);
    return NVML_SUCCESS;
}

int sim_wall_get(struct sim_state *s, uint32_t device, const char *path, struct sim_wall *out, uint64_t *used)
{
    if (strlen(path) >= SIM_GROUP_PATH || below_mount(path) == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t inode = inode_of(path);
    if (inode == 0)
        return NVML_ERROR_NOT_FOUND;
    const struct sim_wall *w = find(s, device, path);
    *out = w != NULL ? *w : (struct sim_wall){1, device, inode, 0, SIM_NO_LIMIT, ""};
    if (w == NULL)
        snprintf(out->path, sizeof(out->path), "%s", path);
    *used = used_behind(s, out);
    return NVML_SUCCESS;
}

uint64_t sim_wall_left(struct sim_state *s, uint32_t device, uint32_t pid)
{
    char group[SIM_GROUP_PATH];
    uint64_t left = SIM_NO_LIMIT;
    if (!atomic_load(&s->has_walls) || !read_group(pid, group))
        return left;
    for (uint32_t i = 0; i < SIM_MAX_WALLS; i++) {
        const struct sim_wall *w = &s->walls[i];
        if (w->device != device || w->hard == SIM_NO_LIMIT || !stands(w) || !holds(w, group))
            continue;
        uint64_t used = used_behind(s, w), room = used < w->hard ? w->hard - used : 0;
        if (room < left)
            left = room;
    }
    return left;
}
