#include "relocated.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lease_open.h"
#include "tenant.h"

#define HISTORY_BYTES 8192
#define LIST_BYTES 4096
#define VISIBLE "CUDA_VISIBLE_DEVICES"

/*
 * Reads the lease's history: lines with an index in the lease and an earlier UUID. Returns false if the tenant was
 * never moved, or the history cannot be read.
 */
static bool read_history(char history[HISTORY_BYTES])
{
    char path[VGPU_LEASE_PATH_MAX + sizeof(VGPU_MOVED_FILE) + 1];
    snprintf(path, sizeof(path), "%s/%s", vgpu_tenant_folder(), VGPU_MOVED_FILE);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, history, HISTORY_BYTES - 1);
    close(fd);
    history[size > 0 ? size : 0] = '\0';
    return size > 0;
}

/* Returns whether `word` is this UUID of a GPU, or a prefix of it, as CUDA accepts it. False for a MIG device. */
static bool names(const char *word, size_t length, const char *uuid)
{
    return length > 4 && strncmp(word, "GPU-", 4) == 0 && strncmp(uuid, word, length) == 0;
}

static bool is_held(const char *word, size_t length)
{
    char uuid[VGPU_UUID_BYTES];
    for (unsigned i = 0; i < vgpu_tenant_devices(); i++) {
        vgpu_tenant_uuid(i, uuid);
        if (names(word, length, uuid))
            return true;
    }
    return false;
}

/*
 * Finds the present UUID of the slice that once had the UUID `word`. Returns false if there is none, or if `word` names
 * a device that the lease has now.
 */
static bool look_up(const char *history, const char *word, size_t length, char uuid[VGPU_UUID_BYTES])
{
    unsigned index;
    char former[VGPU_UUID_BYTES];
    if (is_held(word, length))
        return false;
    for (const char *line = history; line != NULL; line = strchr(line, '\n'), line += line != NULL)
        if (sscanf(line, "%u %63s", &index, former) == 2 && index < vgpu_tenant_devices() &&
            names(word, length, former)) {
            vgpu_tenant_uuid(index, uuid);
            return true;
        }
    return false;
}

void vgpu_relocated_follow(void)
{
    char history[HISTORY_BYTES];
    char list[LIST_BYTES] = "";
    char uuid[VGPU_UUID_BYTES];
    bool changed = false;
    size_t used = 0;
    const char *word = getenv(VISIBLE);
    if (word == NULL || !read_history(history))
        return;
    while (word != NULL) {
        size_t length = strcspn(word, ",");
        bool former = look_up(history, word, length, uuid);
        int added = former
                        ? snprintf(list + used, sizeof(list) - used, "%s%s", used > 0 ? "," : "", uuid)
                        : snprintf(list + used, sizeof(list) - used, "%s%.*s", used > 0 ? "," : "", (int)length, word);
        if (added < 0 || (size_t)added >= sizeof(list) - used)
            /*
             * the new list does not fit in LIST_BYTES, which suffice for all devices of a lease; the variable stays
             * unchanged
             */
            return;
        used += (size_t)added;
        changed |= former;
        word = word[length] == ',' ? word + length + 1 : NULL;
    }
    if (changed)
        setenv(VISIBLE, list, 1);
}
