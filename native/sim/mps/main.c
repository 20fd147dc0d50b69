#include "mps.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int usage(const char *word)
{
    fprintf(stderr, "Invalid option: %s\n", word);
    return 1;
}

int main(int argc, char **argv)
{
    bool daemon = false, foreground = false, multiuser = false;
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
        else if (strcmp(argv[i], "-v") == 0) {
            printf("Binary version: 13000 (vgpu-sim stand-in)\n");
            return 0;
        } else
            return usage(argv[i]);
    }
    return daemon || foreground ? daemon_run(!foreground, multiuser, command_run) : control_shell();
}
