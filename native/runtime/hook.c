/*
 * vgpu-hook: the OCI hooks of containers. The commands, and their hooks:
 *
 *   bind ALLOCATION       createRuntime     the allocation ends with the container's init from here on
 *   container             createContainer   --preload=PATH and --libraries=FOLDER in the container's root;
 *                                           a container whose VGPU_ALLOCATION is not --allocation=ID does not start
 *   end ALLOCATION        poststop          the container is gone
 *   refuse TEXT           createRuntime     the container is not to start, and why
 *   precreate             precreate         (Podman's) config.json from standard input, edited, to standard output
 *
 * --run-dir=FOLDER says where vgpud is. It is linked statically: hooks are given the container's environment by some
 * runtimes, and LD_PRELOAD of an image must not get into a program that runs as root outside of it.
 */
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "door.h"
#include "files.h"
#include "json_text.h"
#include "refuse.h"
#include "rootfs.h"

enum { FAILED = 1, WRONG_USE = 2, END_ANSWER_S = 2 };

struct hook {
    const char *run_dir, *command, *allocation, *preload, *libraries, *only;
};

static const struct vgpu_log to_stderr = {.program = "vgpu-hook"};

static int fail(const char *what)
{
    char text[PATH_MAX + 256];
    snprintf(text, sizeof(text), "%s: %s (E605)", what, strerror(errno));
    vgpu_refuse(&to_stderr, text);
    return FAILED;
}

static bool parse(int argc, char **argv, struct hook *hook)
{
    static const struct {
        const char *flag;
        size_t offset;
    } flags[] = {{"--run-dir=", offsetof(struct hook, run_dir)},
                 {"--preload=", offsetof(struct hook, preload)},
                 {"--allocation=", offsetof(struct hook, only)},
                 {"--libraries=", offsetof(struct hook, libraries)}};
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (size_t f = 0; f < sizeof(flags) / sizeof(flags[0]); f++) {
            size_t length = strlen(flags[f].flag);
            if (strncmp(argv[i], flags[f].flag, length) != 0)
                continue;
            known = true;
            *(const char **)((char *)hook + flags[f].offset) = argv[i] + length;
        }
        if (known)
            continue;
        if (argv[i][0] == '-' || hook->allocation != NULL)
            return false;
        *(hook->command == NULL ? &hook->command : &hook->allocation) = argv[i];
    }
    return hook->command != NULL;
}

/* --- bind, end */

static int pidfd_of_init(const char *state)
{
    const char *value = vgpu_json_member(state, "pid");
    long pid = value == NULL ? -1 : vgpu_json_integer(value);
    if (pid <= 0) {
        errno = ESRCH;
        return -1;
    }
    return (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
}

/* Makes a request to vgpud. `state` is passed on, because its annotations name the pod. */
static int call(const struct hook *hook, uint32_t verb, const char *state, int pidfd, double patience_s, int answer_s)
{
    char *reply = NULL;
    size_t length;
    struct vgpu_door_call asked = {.run_dir = hook->run_dir,
                                   .verb = verb,
                                   .id = hook->allocation,
                                   .body = state,
                                   .body_length = state == NULL ? 0 : strlen(state),
                                   .pidfd = pidfd,
                                   .patience_s = patience_s,
                                   .answer_s = answer_s};
    int status = vgpu_door_call(&asked, &reply, &length);
    if (status == -1)
        vgpu_refuse_absent(&to_stderr, hook->run_dir);
    else if (status == VGPU_DOOR_REFUSED)
        vgpu_refuse(&to_stderr, reply);
    free(reply);
    return status == VGPU_DOOR_DONE ? 0 : FAILED;
}

static int bind_init(const struct hook *hook, const char *state)
{
    int pidfd = pidfd_of_init(state);
    if (pidfd < 0)
        return fail("the container's init cannot be watched");
    return call(hook, VGPU_DOOR_BIND, state, pidfd, VGPU_PATIENCE_S, VGPU_ANSWER_S);
}

/*
 * Restores the bundle's config.json as it was before vgpu-runtime edited it. It is no error if the bundle was not
 * edited, or no longer exists.
 */
static void restore_bundle(const char *state)
{
    char bundle[PATH_MAX / 2], edited[PATH_MAX], original[PATH_MAX];
    const char *value = vgpu_json_member(state, "bundle");
    if (value == NULL || vgpu_json_string(value, bundle, sizeof(bundle)) < 0)
        return;
    snprintf(edited, sizeof(edited), "%s/config.json", bundle);
    snprintf(original, sizeof(original), "%s/config.json.vgpud-original", bundle);
    (void)rename(original, edited);
}

/*
 * Reports a container's end to vgpud. It does not fail, and waits at most END_ANSWER_S for one send or receive: a vgpud
 * that does not run notices the end when it starts.
 */
static int end_container(const struct hook *hook, const char *state)
{
    restore_bundle(state);
    (void)call(hook, VGPU_DOOR_END, NULL, -1, 0, END_ANSWER_S);
    return 0;
}

/* --- container */

/*
 * Returns the text of the container's config.json, and writes the path of its bundle to `bundle`. Returns NULL if the
 * file cannot be found or read.
 */
static char *config_of(const char *state, char bundle[PATH_MAX / 2])
{
    char path[PATH_MAX];
    size_t length;
    const char *value = vgpu_json_member(state, "bundle");
    if (value == NULL || vgpu_json_string(value, bundle, PATH_MAX / 2) < 0)
        return NULL;
    snprintf(path, sizeof(path), "%s/config.json", bundle);
    return vgpu_read_file(path, &length);
}

static bool root_of(const char *config, const char *bundle, char root[PATH_MAX])
{
    char named[PATH_MAX / 2];
    const char *object = vgpu_json_member(config, "root");
    const char *value = object == NULL ? NULL : vgpu_json_member(object, "path");
    if (value == NULL || vgpu_json_string(value, named, sizeof(named)) <= 0)
        return false;
    snprintf(root, PATH_MAX, "%s%s%s", named[0] == '/' ? "" : bundle, named[0] == '/' ? "" : "/", named);
    return true;
}

/*
 * Finds the allocation in the container's environment: the last value of VGPU_ALLOCATION, which counts if its engine
 * injected several.
 */
static bool held_by(const char *config, char held[PATH_MAX])
{
    static const char name[] = "VGPU_ALLOCATION=";
    char entry[PATH_MAX];
    bool found = false;
    const char *process = vgpu_json_member(config, "process");
    const char *env = process == NULL ? NULL : vgpu_json_member(process, "env");
    for (const char *at = env == NULL ? NULL : vgpu_json_first(env); at != NULL; at = vgpu_json_next(at)) {
        if (vgpu_json_string(at, entry, sizeof(entry)) < 0 || strncmp(entry, name, sizeof(name) - 1) != 0)
            continue;
        snprintf(held, PATH_MAX, "%s", entry + sizeof(name) - 1);
        found = true;
    }
    return found;
}

/*
 * Refuses two allocations in one container, because only the environment of the last one would count, and the other
 * could not be used.
 */
static int check_only(const struct hook *hook, const char *config)
{
    char held[PATH_MAX], text[2 * PATH_MAX + 256];
    if (!held_by(config, held) || strcmp(held, hook->only) == 0)
        return 0;
    snprintf(text, sizeof(text),
             "this container was given two allocations, %s and %s, and a container uses one (E103)\n"
             "hint: ask for one resource of vgpud, or one request of a claim, in each container",
             hook->only, held);
    vgpu_refuse(&to_stderr, text);
    return FAILED;
}

static int in_root(const struct hook *hook, const char *root)
{
    if (hook->libraries != NULL && vgpu_libraries(root, hook->libraries) != 0)
        return fail("the driver's libraries cannot be shown to the container's programs");
    if (hook->preload != NULL && vgpu_preload(root, hook->preload) != 0)
        return fail("the container's /etc/ld.so.preload cannot be merged");
    return 0;
}

static int in_container(const struct hook *hook, const char *state)
{
    char root[PATH_MAX], bundle[PATH_MAX / 2];
    errno = EINVAL;
    char *config = config_of(state, bundle);
    if (config == NULL || !root_of(config, bundle, root)) {
        free(config);
        return fail("the container's root cannot be found in its config.json");
    }
    int status = hook->only == NULL ? 0 : check_only(hook, config);
    free(config);
    return status != 0 ? status : in_root(hook, root);
}

/* --- precreate */

static int precreate(const struct hook *hook, const char *config, size_t length)
{
    char *reply = NULL;
    size_t reply_length = length;
    struct vgpu_door_call asked = {.run_dir = hook->run_dir,
                                   .verb = VGPU_DOOR_PREPARE,
                                   .flags = VGPU_DOOR_FOR_PARENT,
                                   .id = "",
                                   .body = config,
                                   .body_length = length,
                                   .pidfd = -1,
                                   .patience_s = VGPU_PATIENCE_S,
                                   .answer_s = VGPU_ANSWER_S};
    int status = VGPU_DOOR_UNCHANGED;
    if (length == 0) {
        errno = ENODATA;
        return fail("there is no config.json on standard input");
    }
    if (vgpu_may_ask(config, length))
        status = vgpu_door_call(&asked, &reply, &reply_length);
    if (status == -1)
        vgpu_refuse_absent(&to_stderr, hook->run_dir);
    else if (status == VGPU_DOOR_REFUSED)
        vgpu_refuse(&to_stderr, reply);
    if (status != VGPU_DOOR_DONE && status != VGPU_DOOR_UNCHANGED)
        return FAILED;
    const char *answer = status == VGPU_DOOR_DONE ? reply : config;
    bool written = fwrite(answer, 1, status == VGPU_DOOR_DONE ? reply_length : length, stdout) > 0 &&
                   fflush(stdout) == 0;
    free(reply);
    return written ? 0 : fail("the edited config.json cannot be written");
}

int main(int argc, char **argv)
{
    struct hook hook = {.run_dir = VGPU_RUN_DIR};
    size_t length;
    if (!parse(argc, argv, &hook)) {
        vgpu_refuse(&to_stderr,
                    "use: vgpu-hook [--run-dir=FOLDER] bind ALLOCATION | end ALLOCATION | refuse TEXT |"
                    " precreate | container [--allocation=ID] [--preload=PATH] [--libraries=FOLDER] (E103)");
        return WRONG_USE;
    }
    char *input = vgpu_read_fd(STDIN_FILENO, &length);
    if (input == NULL)
        return fail("what the runtime says cannot be read");
    if (strcmp(hook.command, "precreate") == 0)
        return precreate(&hook, input, length);
    if (strcmp(hook.command, "container") == 0)
        return in_container(&hook, input);
    if (hook.allocation != NULL && strcmp(hook.command, "refuse") == 0) {
        vgpu_refuse(&to_stderr, hook.allocation);
        return FAILED;
    }
    if (hook.allocation != NULL && strcmp(hook.command, "bind") == 0)
        return bind_init(&hook, input);
    if (hook.allocation != NULL && strcmp(hook.command, "end") == 0)
        return end_container(&hook, input);
    errno = EINVAL;
    return fail("there is no such hook");
}
