/* Entries of the living processes, and the sums over the entries. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the start time of a process in clock ticks since boot, and its state letter; 0: no such process. */
uint64_t sim_start_ticks(uint32_t pid, char *run_state)
{
    char path[40], text[1024];
    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    char *field = strrchr(text, ')'); /* the program's name may contain any character, even ')' */
    if (field == NULL || field[1] == '\0')
        return 0;
    field += 2;
    if (run_state != NULL)
        *run_state = *field;
    for (int i = 3; i < 22 && field != NULL; i++) {
        field = strchr(field, ' ');
        if (field != NULL)
            field++;
    }
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

void sim_proc_release(struct sim_state *s, struct sim_proc *p)
{
    uint32_t index = (uint32_t)(p - s->procs);
    sim_account_end(s, p);
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        if (p->uses[i].used) {
            sim_engine_forget(s, index * SIM_MAX_USES + i, &p->uses[i]);
            p->uses[i].used = 0;
        }
    }
    sim_rm_forget(p);
    p->pid = 0;
    atomic_store(&p->used, 0);
}

/*
 * Returns true if the kernel has cleared the owner in the entry's mutex. The word of a robust mutex names its owner's
 * thread until that thread ends. The thread ends long before the process is a zombie, and reading the word needs no
 * system call.
 */
static bool is_marked(const struct sim_state *s, uint32_t index)
{
    int word = __atomic_load_n(&s->alive[index].__data.__lock, __ATOMIC_ACQUIRE);
    return ((uint32_t)word & FUTEX_TID_MASK) == 0;
}

/*
 * Returns true if the entry's process has ended. An entry is marked too if its process called exec, or goes on without
 * the thread that claimed the entry.
 */
static bool is_gone(const struct sim_state *s, uint32_t index)
{
    const struct sim_proc *p = &s->procs[index];
    char run_state = '?';
    if (!is_marked(s, index))
        return false;
    uint64_t ticks = sim_start_ticks(p->pid, &run_state);
    return ticks != p->start_ticks || run_state == 'Z' || run_state == 'X';
}

void sim_sweep(struct sim_state *s)
{
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++)
        if (atomic_load_explicit(&s->procs[i].used, memory_order_acquire) && is_gone(s, i) &&
            !sim_rm_open_elsewhere(s, &s->procs[i]))
            sim_proc_release(s, &s->procs[i]);
}

/*
 * Returns a free entry whose mutex is free too. After a reboot an entry is free although its living process still holds
 * the mutex.
 */
static struct sim_proc *find_free(struct sim_state *s)
{
    for (uint32_t i = 0; i < SIM_MAX_PROCS; i++) {
        if (atomic_load(&s->procs[i].used))
            continue;
        int got = pthread_mutex_trylock(&s->alive[i]);
        if (got == EOWNERDEAD)
            pthread_mutex_consistent(&s->alive[i]);
        if (got == 0 || got == EOWNERDEAD)
            return &s->procs[i];
    }
    return NULL;
}

struct sim_proc *sim_proc_self(struct sim_state *s)
{
    uint32_t pid = (uint32_t)getpid();
    uint64_t ticks = sim_start_ticks(pid, NULL);
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        /*
         * Frees an entry with this pid that this program did not claim: it is from before an exec, or from an earlier
         * process with the same pid, and its memory is gone.
         */
        if (atomic_load(&s->procs[i].used) && s->procs[i].pid == pid)
            sim_proc_release(s, &s->procs[i]);
    }
    struct sim_proc *p = find_free(s);
    if (p == NULL) {
        sim_sweep(s);
        p = find_free(s);
    }
    if (p == NULL)
        return NULL;
    for (uint32_t i = 0; i < SIM_MAX_USES; i++)
        p->uses[i].used = 0;
    for (uint32_t i = 0; i < SIM_MAX_DEVICES; i++)
        p->card_of[i] = p->suspended_card_of[i] = (uint8_t)i;
    p->restore_broken = p->cannot_suspend = p->shares_by_ipc = 0;
    atomic_store(&p->gate, SIM_RUNNING);
    p->pid = pid;
    p->start_ticks = ticks;
    p->first_seen_us = sim_wall_us();
    uint32_t index = (uint32_t)(p - s->procs);
    if (index >= high)
        atomic_store(&s->proc_high, index + 1);
    atomic_store(&p->used, 1);
    return p;
}

struct sim_proc *sim_proc_find(struct sim_state *s, uint32_t pid)
{
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; pid != 0 && i < high; i++)
        if (atomic_load(&s->procs[i].used) && s->procs[i].pid == pid)
            return is_gone(s, i) ? NULL : &s->procs[i];
    return NULL;
}

bool sim_proc_holds(const struct sim_proc *p)
{
    return atomic_load(&p->used) && sim_gate_of(atomic_load(&p->gate)) != SIM_CHECKPOINTED;
}

struct sim_use *sim_use_find(struct sim_proc *p, uint32_t device, int gi, int ci)
{
    for (uint32_t i = 0; i < SIM_MAX_USES; i++) {
        struct sim_use *u = &p->uses[i];
        if (u->used && u->device == device && u->gi == gi && u->ci == ci)
            return u;
    }
    return NULL;
}

struct sim_use *sim_use_get(struct sim_proc *p, uint32_t device, int gi, int ci)
{
    struct sim_use *u = sim_use_find(p, device, gi, ci);
    for (uint32_t i = 0; u == NULL && i < SIM_MAX_USES; i++) {
        if (p->uses[i].used)
            continue;
        u = &p->uses[i];
        memset(u, 0, sizeof(*u));
        u->device = device;
        u->gi = gi;
        u->ci = ci;
        u->mps_fraction = 1.0;
        u->used = 1;
    }
    return u;
}

uint64_t sim_use_bytes(const struct sim_use *u)
{
    uint64_t sum = 0;
    for (int k = 0; k < SIM_KINDS; k++)
        if (k != SIM_MANAGED)
            sum += u->bytes[k];
    return sum;
}

uint64_t sim_used_bytes(struct sim_state *s, uint32_t device, int gi)
{
    uint64_t sum = 0;
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_proc *p = &s->procs[i];
        if (!sim_proc_holds(p))
            continue;
        for (uint32_t j = 0; j < SIM_MAX_USES && p->uses[j].used; j++) { /* the used entries come first */
            const struct sim_use *u = &p->uses[j];
            if (u->device == device && (gi == SIM_NONE || u->gi == gi))
                sum += sim_use_bytes(u);
        }
    }
    return sum;
}

uint64_t sim_capacity_bytes(const struct sim_state *s, uint32_t device, int gi)
{
    const struct sim_device *d = &s->devices[device];
    if (gi != SIM_NONE)
        return d->gi_profiles[d->gis[gi].profile].memory_mib << 20;
    uint64_t taken = d->memory_reserved + d->hidden_bytes;
    return taken < d->memory_total ? d->memory_total - taken : 0;
}

bool sim_in_use(struct sim_state *s, uint32_t device, int gi, int ci)
{
    sim_sweep(s);
    uint32_t high = atomic_load(&s->proc_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_proc *p = &s->procs[i];
        if (!sim_proc_holds(p))
            continue;
        for (uint32_t j = 0; j < SIM_MAX_USES && p->uses[j].used; j++) {
            const struct sim_use *u = &p->uses[j];
            if (u->contexts > 0 && u->device == device && (gi == SIM_NONE || u->gi == gi) &&
                (ci == SIM_NONE || u->ci == ci))
                return true;
        }
    }
    return false;
}
