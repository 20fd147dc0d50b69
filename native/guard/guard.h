/*
 * guard.h: prevents a process of an MPS tenant from initialising CUDA without its MPS control daemon.
 *
 * If no control daemon answers, the driver runs a process without MPS, and so with no limit at all (measured on an
 * H200, driver 580). The guard wraps cuInit and refuses in that case.
 */
#ifndef VGPU_GUARD_H
#define VGPU_GUARD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>

/* Values of CUresult, from cuda.h, which is not included: it renames the functions that are defined here. */
enum {
    GUARD_SUCCESS = 0,
    GUARD_NO_DRIVER = 303,      /* CUDA_ERROR_SHARED_OBJECT_INIT_FAILED */
    GUARD_NO_CONNECTION = 805,  /* CUDA_ERROR_MPS_CONNECTION_FAILED */
    GUARD_NO_MORE_CLIENTS = 808 /* CUDA_ERROR_MPS_MAX_CLIENTS_REACHED */
};

/* Paths in a container. They do not depend on the environment (vgpud/modes/mps/edits.py). */
#define GUARD_CONTAINER_PIPE "/run/vgpu/mps/p"
#define GUARD_CONTAINER_TENANT "/run/vgpu/mps-tenant"

/* Identifies one run of a control daemon, because each run creates a new socket. */
struct guard_life {
    dev_t device;
    ino_t inode;
    struct timespec changed;
};

/* In probe.c. Returns whether a control daemon accepts connections in `pipe`, and which run of it. Never blocks. */
bool guard_probe(const char *pipe, struct guard_life *life);
bool guard_same_life(const struct guard_life *a, const struct guard_life *b);

/*
 * In admission.c. Takes this process's part of the tenant's limits, and sets it in the environment for the driver.
 * Returns GUARD_SUCCESS; GUARD_NO_MORE_CLIENTS if the tenant's other processes have left too little;
 * GUARD_NO_CONNECTION if the limits cannot be read.
 */
int guard_admit(void);
void guard_leave(void); /* gives up the process's part of the limits, as the end of the process also does */

/* In guard.c. */
typedef int (*guard_init_fn)(unsigned flags);
int guard_init(guard_init_fn real, unsigned flags);

#endif
