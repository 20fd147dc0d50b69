/*
 * vgpu-arbiter: registers the processes of every lease of mode preload, clears the slots of dead processes, and grants
 * time slices.
 *
 *     vgpu-arbiter --run-dir DIR [--foreground] [--control-device PATH]
 *
 * vgpud and the arbiter start `vgpu-arbiter --keep` (keeper.h), and vgpud `vgpu-arbiter --receive BYTES` (receiver.h).
 *
 * The arbiter serves DIR/leases/<allocation>/arbiter.sock and takes orders on DIR/arbiter/control.sock (root). The
 * kernel keeps the state of live processes (the locks on `usage` slots). So after a kill and a restart the arbiter
 * finds every tenant again, without a state file and without vgpud.
 *
 * Exit status: 2 for wrong arguments, 3 if the folder's lock cannot be taken (another arbiter serves it), 1 for
 * anything else.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "usage_guard.h"
#include "usage_io.h"
#include "control.h"
#include "keeper.h"
#include "loop.h"
#include "process.h"
#include "receiver.h"
#include "rest.h"
#include "looks.h"
#include "rm.h"
#include "serve.h"
#include "systemd.h"
#include "turns.h"
#include "unregistered.h"

enum { EXIT_USAGE = 2, EXIT_RUNNING = 3 };

static int fail(const char *what, int error)
{
    fprintf(stderr, "vgpu-arbiter: %s: %s\n", what, strerror(error < 0 ? -error : error));
    return EXIT_FAILURE;
}

/*
 * Raises the limit of descriptors. Each lease needs one, two more while it has processes, and each process two.
 * Together that may be more than the usual soft limit of 1024.
 */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int open_folder(const char *path, mode_t mode)
{
    if (mkdir(path, mode) != 0 && errno != EEXIST)
        return -errno;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static void tick(struct lease *lease, bool look)
{
    usage_guard_renew(lease);
    if (!lease_listen(lease))
        rest_look_later(lease);
    if (look)
        process_look_again(lease);
    if (look && unregistered_look(lease))
        rest_look_later(lease);
}

static bool look_at_one(struct lease *lease)
{
    return process_look_at_one(lease) || unregistered_clear_one(lease);
}

static int start(const char *run_dir, const char *control_device)
{
    char path[4096];
    int run_fd = open_folder(run_dir, 0711); /* users may enter the folder, but not list it: see docs/security.md */
    if (run_fd < 0)
        return fail(run_dir, run_fd);
    snprintf(path, sizeof(path), "%s/leases", run_dir);
    int leases_fd = open_folder(path, 0711);
    if (leases_fd < 0)
        return fail(path, leases_fd);
    snprintf(path, sizeof(path), "%s/arbiter", run_dir);
    int own_fd = open_folder(path, 0700);
    if (own_fd < 0)
        return fail(path, own_fd);
    int lock_fd = openat(own_fd, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (lock_fd < 0 || flock(lock_fd, LOCK_EX | LOCK_NB) != 0) {
        fprintf(stderr, "vgpu-arbiter: another arbiter serves %s\n", run_dir);
        return EXIT_RUNNING;
    }
    int error = usage_io_open();
    if (error == 0)
        error = loop_open();
    if (error == 0)
        error = turns_open(run_fd, control_device);
    if (error == 0)
        error = looks_open(look_at_one);
    if (error == 0)
        error = rest_open(tick);
    if (error == 0)
        error = systemd_watch_open();
    if (error == 0 && usage_guard_open() != 0)
        fputs("vgpu-arbiter: inotify failed: usage files are not kept at their size, and slots of processes that ended "
              "before they registered stay taken\n",
              stderr);
    if (error != 0)
        return fail("cannot open an event loop", error);
    lease_scan(leases_fd);
    snprintf(path, sizeof(path), "%s/arbiter/control.sock", run_dir);
    error = control_open(path);
    return error == 0 ? 0 : fail(path, error);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"run-dir", required_argument, NULL, 'r'},
                                            {"foreground", no_argument, NULL, 'f'},
                                            {"control-device", required_argument, NULL, 'c'},
                                            {0}};
    const char *run_dir = NULL;
    const char *control_device = RM_CONTROL_DEVICE;
    bool foreground = false;
    if (argc == 2 && strcmp(argv[1], "--keep") == 0)
        return keeper_run();
    if (argc == 3 && strcmp(argv[1], "--receive") == 0)
        return receiver_run((size_t)strtoul(argv[2], NULL, 10));
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 'r')
            run_dir = optarg;
        else if (option == 'f')
            foreground = true;
        else if (option == 'c')
            control_device = optarg;
        else
            return EXIT_USAGE;
    }
    if (run_dir == NULL || optind != argc) {
        fputs("usage: vgpu-arbiter --run-dir DIR [--foreground] [--control-device PATH]\n", stderr);
        return EXIT_USAGE;
    }
    raise_descriptor_limit();
    int status = start(run_dir, control_device);
    if (status != 0)
        return status;
    if (!foreground && daemon(0, 1) != 0)
        return fail("cannot go to the background", errno);
    systemd_ready();
    return fail("event loop", loop_run());
}
