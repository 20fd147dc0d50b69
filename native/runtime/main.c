/*
 * vgpu-runtime: an OCI runtime that lets vgpud allocate what a container requests, and then executes runc or crun. For
 * a container without a request it only reads config.json.
 */
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "door.h"
#include "files.h"
#include "json_text.h"
#include "refuse.h"

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
/* suffix of the file that keeps the earlier config.json; vgpu-hook puts it back when the container has ended */
#define ORIGINAL ".vgpud-original"

enum { NAME_ROOM = 64 }; /* a longer name of a container is left out */

struct invocation {
    const char *run_dir, *runtime; /* values of vgpu-runtime's own flags */
    const char *command, *id, *bundle, *config;
    struct vgpu_log log;
};

/* Flags of runc 1.x and crun 1.x, before and after the command, whose value may be the next word. */
static const char *const valued[] = {
    "root", "log",    "log-format", "log-level", "criu",         "rootless",       "bundle",
    "b",    "config", "f",          "pid-file",  "preserve-fds", "console-socket", "cgroup-manager"};

static bool is_valued(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof(valued) / sizeof(valued[0]); i++)
        if (strlen(valued[i]) == length && strncmp(valued[i], name, length) == 0)
            return true;
    return false;
}

static bool is(const char *name, size_t length, const char *other)
{
    return strlen(other) == length && strncmp(name, other, length) == 0;
}

static void take_flag(struct invocation *asked, const char *name, size_t length, const char *value)
{
    if (is(name, length, "bundle") || is(name, length, "b"))
        asked->bundle = value;
    else if (is(name, length, "config") || is(name, length, "f"))
        asked->config = value;
    else if (is(name, length, "log"))
        asked->log.path = value;
    else if (is(name, length, "log-format"))
        asked->log.json = strcmp(value, "json") == 0;
}

/* Parses the command line, and removes vgpu-runtime's own flags; argv then has the runtime's arguments. */
static void parse(int argc, char **argv, struct invocation *asked)
{
    int kept = 1;
    for (int i = 1; i < argc; i++) {
        char *word = argv[i];
        if (strncmp(word, "--vgpu-run-dir=", 15) == 0) {
            asked->run_dir = word + 15;
            continue;
        }
        if (strncmp(word, "--vgpu-runtime=", 15) == 0) {
            asked->runtime = word + 15;
            continue;
        }
        argv[kept++] = word;
        if (word[0] != '-' || word[1] == '\0') {
            *(asked->command == NULL ? &asked->command : &asked->id) = word;
            continue;
        }
        const char *name = word + strspn(word, "-");
        size_t length = strcspn(name, "=");
        const char *value = name[length] == '=' ? name + length + 1 : NULL;
        if (value == NULL && is_valued(name, length) && i + 1 < argc)
            value = argv[kept++] = argv[++i];
        if (value != NULL)
            take_flag(asked, name, length, value);
    }
    argv[kept] = NULL;
}

static bool is_ourselves(const char *path)
{
    struct stat ours, other;
    return stat("/proc/self/exe", &ours) == 0 && stat(path, &other) == 0 && ours.st_dev == other.st_dev &&
           ours.st_ino == other.st_ino;
}

static bool is_runtime(const char *path)
{
    return access(path, X_OK) == 0 && !is_ourselves(path);
}

/* Finds the path of a runtime; a name with a slash is a path. */
static bool find_named(const char *name, char out[PATH_MAX])
{
    const char *folders = getenv("PATH");
    if (strchr(name, '/') != NULL)
        return snprintf(out, PATH_MAX, "%s", name) < PATH_MAX && is_runtime(out);
    if (folders == NULL || folders[0] == '\0')
        folders = DEFAULT_PATH;
    while (*folders != '\0') {
        int length = (int)strcspn(folders, ":");
        if (length > 0 && snprintf(out, PATH_MAX, "%.*s/%s", length, folders, name) < PATH_MAX && is_runtime(out))
            return true;
        folders += length + (folders[length] == ':');
    }
    return false;
}

static bool find_runtime(const struct invocation *asked, char out[PATH_MAX])
{
    const char *named = asked->runtime != NULL ? asked->runtime : getenv("VGPU_OCI_RUNTIME");
    if (named != NULL && named[0] != '\0')
        return find_named(named, out);
    return find_named("runc", out) || find_named("crun", out);
}

/*
 * Must vgpud see the config.json? Also for a container of containerd's or CRI-O's CRI without a request: its pod
 * selected this runtime, and an engine that does not pass annotations on hides the pod's request.
 */
static bool may_ask(const char *config, size_t length)
{
    return vgpu_may_ask(config, length) || memmem(config, length, "io.kubernetes.cri", 17) != NULL;
}

/* Returns the config.json from before it was edited for an earlier container of this bundle, or else `config`. */
static char *unedited(const char *path, char *config, size_t *length)
{
    char original[PATH_MAX];
    size_t found_length;
    if (memmem(config, *length, "\"vgpud.io/prepared\"", 19) == NULL ||
        snprintf(original, sizeof(original), "%s" ORIGINAL, path) >= (int)sizeof(original))
        return config;
    char *found = vgpu_read_file(original, &found_length);
    if (found == NULL)
        return config;
    free(config);
    *length = found_length;
    return found;
}

/*
 * Finds the name of a container of Podman or CRI-O: conmon, which starts the runtime, has the name on its command line
 * (conmon(8), -n).
 */
static bool name_of_conmon(char name[NAME_ROOM])
{
    char path[64];
    size_t length;
    bool found = false;
    snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)getppid());
    char *words = vgpu_read_file(path, &length);
    if (words == NULL)
        return false;
    const char *slash = strrchr(words, '/'), *end = words + length;
    if (strcmp(slash == NULL ? words : slash + 1, "conmon") != 0)
        end = words;
    for (const char *at = words; at < end && !found; at += strlen(at) + 1)
        if (strcmp(at, "-n") == 0 && at + 3 < end)
            found = snprintf(name, NAME_ROOM, "%s", at + 3) < NAME_ROOM;
    free(words);
    return found;
}

/*
 * Finds Docker's name of a container. Docker mounts /etc/hostname from the container's folder, whose config.v2.json has
 * the name with a slash before it.
 */
static bool name_of_docker(const char *config, const char *id, char name[NAME_ROOM])
{
    char mark[PATH_MAX + 16], path[PATH_MAX], text[NAME_ROOM + 1];
    size_t length;
    snprintf(mark, sizeof(mark), "/%s/hostname\"", id);
    const char *end = strstr(config, mark), *start = end;
    while (start != NULL && start > config && start[-1] != '"')
        start--;
    if (start == NULL ||
        snprintf(path, sizeof(path), "%.*s/%s/config.v2.json", (int)(end - start), start, id) >= PATH_MAX)
        return false;
    char *own = vgpu_read_file(path, &length);
    const char *value = own == NULL ? NULL : vgpu_json_member(own, "Name");
    bool found = value != NULL && vgpu_json_string(value, text, sizeof(text)) > 1 && text[0] == '/';
    if (found)
        snprintf(name, NAME_ROOM, "%s", text + 1);
    free(own);
    return found;
}

static int put_in_force(const char *path, const char *before, size_t before_length, const char *after,
                        size_t after_length)
{
    char original[PATH_MAX];
    if (snprintf(original, sizeof(original), "%s" ORIGINAL, path) >= (int)sizeof(original)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (vgpu_replace_file(original, before, before_length) != 0)
        return -1;
    return vgpu_replace_file(path, after, after_length);
}

/*
 * Replaces the container's config.json by the one that vgpud returns. Returns false if the container must not start;
 * the reason was then printed.
 */
static bool prepare(const struct invocation *asked)
{
    char path[PATH_MAX], text[PATH_MAX + 128], id[PATH_MAX], name[NAME_ROOM] = "";
    size_t length, reply_length;
    char *reply = NULL;
    if (asked->config != NULL)
        snprintf(path, sizeof(path), "%s", asked->config);
    else
        snprintf(path, sizeof(path), "%s/config.json", asked->bundle != NULL ? asked->bundle : ".");
    char *config = vgpu_read_file(path, &length);
    if (config == NULL && errno == EFBIG) {
        /* it may have a request, and the container must not start without what it requests */
        vgpu_refuse(&asked->log, "the container's config.json is larger than 64 MiB (E103)\n"
                                 "hint: make its annotations, environment and mounts smaller");
        return false;
    }
    if (config == NULL || !may_ask(config, length)) {
        free(config); /* the container runtime itself reports a config.json that cannot be read */
        return true;
    }
    config = unedited(path, config, &length);
    snprintf(id, sizeof(id), "%s", asked->id != NULL ? asked->id : "");
    if (name_of_conmon(name) || name_of_docker(config, id, name))
        snprintf(id, sizeof(id), "%s/%s", asked->id != NULL ? asked->id : "", name);
    struct vgpu_door_call call = {.run_dir = asked->run_dir,
                                  .verb = VGPU_DOOR_PREPARE,
                                  .id = id,
                                  .body = config,
                                  .body_length = length,
                                  .pidfd = -1,
                                  .patience_s = VGPU_PATIENCE_S,
                                  .answer_s = VGPU_ANSWER_S};
    int status = vgpu_door_call(&call, &reply, &reply_length);
    bool goes_on = status == VGPU_DOOR_UNCHANGED || status == VGPU_DOOR_DONE;
    if (status == -1)
        vgpu_refuse_absent(&asked->log, asked->run_dir);
    else if (!goes_on)
        vgpu_refuse(&asked->log, reply);
    if (status == VGPU_DOOR_DONE && put_in_force(path, config, length, reply, reply_length) != 0) {
        snprintf(text, sizeof(text), "cannot write %s: %s (E605)", path, strerror(errno));
        vgpu_refuse(&asked->log, text);
        goes_on = false;
    }
    free(reply);
    free(config);
    return goes_on;
}

int main(int argc, char **argv)
{
    const char *run_dir = getenv("VGPUD_RUN_DIR");
    struct invocation asked = {.run_dir = run_dir != NULL && run_dir[0] != '\0' ? run_dir : VGPU_RUN_DIR,
                               .log = {.program = "vgpu-runtime"}};
    char runtime[PATH_MAX];
    parse(argc, argv, &asked);
    if (!find_runtime(&asked, runtime)) {
        vgpu_refuse(&asked.log, "there is no OCI runtime to call (E106)\n"
                                "hint: install runc or crun, or name one in --vgpu-runtime or VGPU_OCI_RUNTIME");
        return 127;
    }
    static const char *const making[] = {"create", "run", "restore"};
    bool makes = false;
    for (size_t i = 0; asked.command != NULL && i < sizeof(making) / sizeof(making[0]); i++)
        makes |= strcmp(asked.command, making[i]) == 0;
    if (makes && !prepare(&asked))
        return 1;
    argv[0] = runtime;
    execv(runtime, argv);
    fprintf(stderr, "vgpu-runtime: cannot run %s: %s\n", runtime, strerror(errno));
    return 126;
}
