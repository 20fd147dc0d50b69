/*
 * What the simulated libcuda knows of its own process: the lock of its objects, the devices that the process sees, and
 * the gate, at which calls wait while the process is suspended. These functions call no others of this folder.
 */
#include <unistd.h>

#include "internal.h"

struct cu_process cu = {.lock = PTHREAD_MUTEX_INITIALIZER, .mps_fraction = 1.0, .rm_file = -1};

void vgpuSimSetKernelMicroseconds(double microseconds);

void vgpuSimSetKernelMicroseconds(double microseconds)
{
    cu.kernel_us = microseconds;
}

void cu_lock(void)
{
    pthread_mutex_lock(&cu.lock);
}

void cu_unlock(void)
{
    pthread_mutex_unlock(&cu.lock);
}

bool cu_checkpointed(void)
{
    return sim_gate_of(atomic_load_explicit(&cu.proc->gate, memory_order_acquire)) == SIM_CHECKPOINTED;
}

CUresult cu_gate(void)
{
    for (;;) {
        uint32_t gate = atomic_load_explicit(&cu.proc->gate, memory_order_acquire);
        if (gate == atomic_load_explicit(&cu.gate_seen, memory_order_relaxed))
            return CUDA_SUCCESS;
        if (sim_gate_of(gate) == SIM_FAILED)
            return CUDA_ERROR_UNKNOWN;
        if (sim_gate_of(gate) != SIM_RUNNING) {
            sim_gate_wait(cu.proc);
            continue;
        }
        /* several threads may run this loop at once: all write the same values */
        for (int i = 0; i < cu.device_count; i++)
            cu.devices[i].device = cu.proc->card_of[cu.devices[i].card];
        atomic_store_explicit(&cu.gate_seen, gate, memory_order_relaxed);
    }
}

void cu_sim_lock(void)
{
    sim_lock(cu.s);
    while (sim_gate_shut(cu.proc)) {
        sim_unlock(cu.s);
        cu_gate();
        sim_lock(cu.s);
    }
}

struct sim_device *cu_sim_device(int ordinal)
{
    return &cu.s->devices[cu.devices[ordinal].device];
}

uint32_t cu_sm_count(int ordinal)
{
    const struct cu_device *d = &cu.devices[ordinal];
    const struct sim_device *card = cu_sim_device(ordinal);
    return d->gi == SIM_NONE ? card->sm_count : card->gis[d->gi].cis[d->ci].sm_count;
}

void cu_cannot_suspend(int change)
{
    cu.shared_memories += change;
    __atomic_store_n(&cu.proc->cannot_suspend, cu.shared_memories > 0, __ATOMIC_RELEASE);
}

/*
 * Is this process in a job of `cuda-checkpoint --launch-job`? The tool makes a file, whose name all processes of the
 * job inherit.
 */
static bool in_checkpoint_job(void)
{
    const char *file = getenv("CUDA_CHECKPOINT_JOB_FILE");
    return file != NULL && access(file, R_OK) == 0;
}

void cu_shares_by_ipc(int change)
{
    uint32_t shares = in_checkpoint_job() ? SIM_SHARES_IN_JOB : SIM_SHARES;
    cu.ipc_memories += change;
    __atomic_store_n(&cu.proc->shares_by_ipc, cu.ipc_memories > 0 ? shares : SIM_SHARES_NOT, __ATOMIC_RELEASE);
}
