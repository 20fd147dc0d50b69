#include "mps.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int usage(const char *word)
{
    fprintf(stderr, "Invalid option: %s\n", word);
    return 1;
}

static int node_branch(void)
{
    const struct sim_state *state = sim_attach();
    return state == NULL ? 0 : sim_branch(state);
}

/*
 * Returns the version that `-v` prints: as measured with branches 580, 595 and 615. Branches 590 to 594 count as 595,
 * because they have partitions too; any other branch counts as the next older of the three, or as 580 if it is older.
 */
static int binary_version(void)
{
    int branch = node_branch();
    return branch >= 615 ? 13040 : branch >= MPS_BRANCH_OF_PARTITIONS ? 13020 : 13000;
}

int main(int argc, char **argv)
{
    bool daemon = false, foreground = false, multiuser = false, partitions = false;
    const char *name = strrchr(argv[0], '/');
    if (strcmp(name == NULL ? argv[0] : name + 1, MPS_SERVER) == 0)
        return server_main(argc > 1 ? (pid_t)atol(argv[1]) : getppid());
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-d") == 0)
            daemon = true;
        else if (strcmp(argv[i], "-f") == 0)
            foreground = true;
        else if (strcmp(argv[i], "-multiuser-server") == 0)
            multiuser = true;
        else if (strcmp(argv[i], "-S") == 0 && node_branch() >= MPS_BRANCH_OF_PARTITIONS)
            partitions = true;
        else if (strcmp(argv[i], "-v") == 0) {
            printf("Binary version: %d (vgpu-sim stand-in)\n", binary_version());
            return 0;
        } else
            return usage(argv[i]);
    }
    return daemon || foreground ? daemon_run(!foreground, multiuser, partitions, command_run) : control_shell();
}
