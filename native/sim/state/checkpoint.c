/*
 * Suspends a process from outside: lock, checkpoint, restore, unlock.
 *
 * The simulated device memory is the process's own memory, so a checkpoint moves nothing: sim_proc_holds leaves the
 * entry of a checkpointed process out of every sum, and a restore checks whether the memory fits again. The process
 * itself waits at its next driver call; inside a call, it waits before it takes memory or submits work.
 *
 * Sources: the states and results are from NVIDIA's driver API manual. What the driver refuses, and the process that
 * cannot be restored again after a restore ran out of memory, are from the issues and the manual of
 * NVIDIA/cuda-checkpoint. Its section "610 Features" says that drivers from 610 on suspend memory shared by
 * cuIpcGetMemHandle, for processes in a job of `cuda-checkpoint --launch-job`. What the driver does without a job is
 * not known; here it refuses.
 */
#include <cuda.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

enum { BRANCH_OF_CHECKPOINTS = 570, BRANCH_OF_MOVES = 580, BRANCH_OF_IPC = 610 };
#define LOOK_NS 200000 /* the interval at which a lock checks whether the submitted work is complete */

static void set_gate(struct sim_proc *p, enum sim_gate to, bool moved)
{
    uint32_t now = atomic_load(&p->gate);
    uint32_t next = now - now % SIM_GATE_STATES + (uint32_t)to + (moved ? SIM_GATE_STATES : 0);
    atomic_store(&p->gate, next);
    syscall(SYS_futex, &p->gate, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Finds the process with this pid in state `wanted`. Returns a CUresult. The caller holds sim_lock. */
static int find(struct sim_state *s, uint32_t pid, enum sim_gate wanted, struct sim_proc **out)
{
    struct sim_proc *p = sim_proc_find(s, pid);
    if (p == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *out = p;
    return sim_gate_of(atomic_load(&p->gate)) == wanted ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

static bool any_mps(const struct sim_proc *p)
{
    bool any = false;
    for (uint32_t i = 0; i < SIM_MAX_USES; i++)
        any = any || (p->uses[i].used && p->uses[i].mps);
    return any;
}

static bool is_idle(struct sim_state *s, struct sim_proc *p)
{
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        struct sim_use *u = &p->uses[i];
        if (u->used && !sim_engine_idle(s, u))
            return false;
    }
    return true;
}

int sim_checkpoint_lock(struct sim_state *s, uint32_t pid, uint32_t most_ms)
{
    struct sim_proc *p = NULL;
    uint64_t end = sim_now_ns() + (uint64_t)most_ms * 1000000;
    sim_lock(s);
    int result = find(s, pid, SIM_RUNNING, &p);
    if (result == CUDA_SUCCESS && (sim_branch(s) < BRANCH_OF_CHECKPOINTS || any_mps(p)))
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS)
        set_gate(p, SIM_LOCKED, false); /* after this, the process can add neither memory nor work */
    while (result == CUDA_SUCCESS && !is_idle(s, p)) {
        sim_unlock(s);
        nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
        sim_lock(s);
        result = find(s, pid, SIM_LOCKED, &p); /* the process may have been killed meanwhile */
        if (result == CUDA_SUCCESS && most_ms != 0 && sim_now_ns() >= end) {
            set_gate(p, SIM_RUNNING, false);
            result = CUDA_ERROR_NOT_READY;
        }
    }
    sim_unlock(s);
    return result;
}

static bool shares_memory(const struct sim_state *s, const struct sim_proc *p)
{
    enum sim_sharing most = sim_branch(s) < BRANCH_OF_IPC ? SIM_SHARES_NOT : SIM_SHARES_IN_JOB;
    return p->cannot_suspend || p->shares_by_ipc > (uint32_t)most;
}

static bool has_managed(const struct sim_proc *p)
{
    bool any = false;
    for (uint32_t i = 0; i < SIM_MAX_USES; i++)
        any = any || (p->uses[i].used && p->uses[i].bytes[SIM_MANAGED] > 0);
    return any;
}

int sim_checkpoint_save(struct sim_state *s, uint32_t pid)
{
    struct sim_proc *p = NULL;
    sim_lock(s);
    int result = find(s, pid, SIM_LOCKED, &p);
    if (result == CUDA_SUCCESS && !is_idle(s, p))
        result = CUDA_ERROR_ILLEGAL_STATE; /* the process is not locked yet: the lock call has not returned */
    if (result == CUDA_SUCCESS && (has_managed(p) || shares_memory(s, p))) {
        /* the process stays failed: the real driver does not undo a checkpoint that failed half-way either */
        set_gate(p, SIM_FAILED, false);
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result == CUDA_SUCCESS) {
        memcpy(p->suspended_card_of, p->card_of, sizeof(p->card_of));
        for (uint32_t i = 0; i < SIM_MAX_USES; i++)
            p->uses[i].suspended_device = p->uses[i].device;
        set_gate(p, SIM_CHECKPOINTED, false);
    }
    sim_unlock(s);
    return result;
}

/*
 * Checks the target of each card. The caller must name every card of the node, even those that the process does not use
 * or see, and each card needs a target of its own of the same model (NVIDIA/cuda-checkpoint issue 35; cuda.core's
 * checkpoint module).
 */
static int check_moves(const struct sim_state *s, const struct sim_proc *p, const uint8_t *card_of)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < SIM_MAX_DEVICES; i++) {
        if (i >= s->device_count && card_of[i] >= SIM_MAX_DEVICES)
            continue;
        uint32_t bit = 1u << card_of[i] % 32;
        if (i >= s->device_count || card_of[i] >= s->device_count || (taken & bit) ||
            strcmp(s->devices[i].name, s->devices[card_of[i]].name) != 0)
            return CUDA_ERROR_INVALID_VALUE;
        taken |= bit;
    }
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        const struct sim_use *u = &p->uses[i];
        if (u->used && u->contexts > 0 && u->gi != SIM_NONE)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return sim_branch(s) < BRANCH_OF_MOVES ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static uint32_t moved_to(const uint8_t *card_of, uint32_t card)
{
    return card_of == NULL || card_of[card] >= SIM_MAX_DEVICES ? card : card_of[card];
}

/*
 * Checks whether the memory of a suspended process fits. No device counts the process now, so its uses are checked one
 * after the other.
 */
static int check_room(struct sim_state *s, const struct sim_proc *p)
{
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        const struct sim_use *u = &p->uses[i];
        if (!u->used || u->contexts == 0)
            continue;
        const struct sim_device *d = &s->devices[u->device];
        if (d->lost || d->compute_mode == CU_COMPUTEMODE_PROHIBITED ||
            (d->compute_mode != CU_COMPUTEMODE_DEFAULT && sim_in_use(s, u->device, u->gi, SIM_NONE)) ||
            (u->gi == SIM_NONE ? d->mig_current != 0 : !d->gis[u->gi].cis[u->ci].used))
            return CUDA_ERROR_DEVICE_UNAVAILABLE;
        uint64_t bytes = 0;
        for (uint32_t j = 0; j < SIM_MAX_USES; j++) /* two compute instances may share one GPU instance */
            if (p->uses[j].used && p->uses[j].device == u->device && p->uses[j].gi == u->gi)
                bytes += sim_use_bytes(&p->uses[j]);
        uint64_t capacity = sim_capacity_bytes(s, u->device, u->gi);
        if (bytes > capacity || sim_used_bytes(s, u->device, u->gi) > capacity - bytes ||
            (u->gi == SIM_NONE && bytes > sim_wall_left(s, u->device, p->pid)))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

static void place(struct sim_state *s, struct sim_proc *p, const uint8_t *card_of)
{
    for (uint32_t i = 0; i < SIM_MAX_DEVICES; i++)
        p->card_of[i] = (uint8_t)moved_to(card_of, p->suspended_card_of[i]);
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        struct sim_use *u = &p->uses[i];
        if (!u->used)
            continue;
        struct sim_device *from = &s->devices[u->device];
        sim_engine_lock(from);
        u->device = moved_to(card_of, u->suspended_device);
        sim_engine_unlock(from);
    }
}

int sim_checkpoint_restore(struct sim_state *s, uint32_t pid, const uint8_t *card_of)
{
    struct sim_proc *p = NULL;
    sim_lock(s);
    sim_sweep(s);
    int result = find(s, pid, SIM_CHECKPOINTED, &p);
    if (result == CUDA_SUCCESS && p->restore_broken)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    if (result == CUDA_SUCCESS && card_of != NULL)
        result = check_moves(s, p, card_of);
    if (result == CUDA_SUCCESS) {
        /* no device counts the process meanwhile; if the caller is killed here, the call can be repeated */
        place(s, p, card_of);
        result = check_room(s, p);
        if (result == CUDA_SUCCESS)
            set_gate(p, SIM_LOCKED, card_of != NULL);
        else
            place(s, p, NULL);
        p->restore_broken = result == CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_unlock(s);
    return result;
}

int sim_checkpoint_unlock(struct sim_state *s, uint32_t pid)
{
    struct sim_proc *p = NULL;
    sim_lock(s);
    int result = find(s, pid, SIM_LOCKED, &p);
    if (result == CUDA_SUCCESS)
        set_gate(p, SIM_RUNNING, false);
    sim_unlock(s);
    return result;
}
