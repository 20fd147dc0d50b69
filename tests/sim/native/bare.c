/*
 * bare.c: bare DEVICE MOST_MIB takes device memory in steps of 64 MiB until the driver refuses or MOST_MIB are held, prints
 * the sum, and holds it until standard input ends. It has no library of the driver: on a card such a program makes the
 * ioctl calls of /dev/nvidiactl itself, and on the simulated node it calls the functions that stand for the driver's part
 * in the kernel. Linked statically, it cannot have a library preloaded either.
 */
#include <stdio.h>
#include <stdlib.h>

#include "../../../native/sim/state/state.h"

enum { STEP_MIB = 64 };

static struct sim_use *open_device(struct sim_state *s, uint32_t device)
{
    struct sim_proc *p = sim_proc_self(s);
    struct sim_use *u = p != NULL ? sim_use_get(p, device, SIM_NONE, SIM_NONE) : NULL;
    if (u == NULL || !sim_use_take(s, u, SIM_CONTEXT, s->devices[device].context_bytes))
        return NULL;
    u->contexts = 1;
    return u;
}

int main(int argc, char **argv)
{
    struct sim_state *s = argc == 3 ? sim_attach() : NULL;
    if (s == NULL) {
        fputs(argc == 3 ? "bare: there is no node\n" : "usage: bare DEVICE MOST_MIB\n", stderr);
        return 2;
    }
    long most = atol(argv[2]), got = 0;
    sim_lock(s);
    struct sim_use *u = open_device(s, (uint32_t)atol(argv[1]));
    while (u != NULL && got < most && sim_use_take(s, u, SIM_PLAIN, (uint64_t)STEP_MIB << 20))
        got += STEP_MIB;
    sim_unlock(s);
    printf("{\"mib\": %ld}\n", got);
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    return 0;
}
