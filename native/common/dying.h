/*
 * dying.h: between a process that lives and one that is gone.
 *
 * Any thread may call these functions; each opens and closes one file of /proc.
 */
#ifndef VGPU_DYING_H
#define VGPU_DYING_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * Is the process on its way out? The kernel drops a dying process's locks while it closes its files, and
 * only after that are NVIDIA's files released and the card's memory with them (tens of milliseconds): until
 * the process is gone its memory is on the card, though no process holds its slot. False for one that is alive,
 * gone, a zombie with nothing left, or that /proc does not show.
 */
bool vgpu_process_dying(pid_t pid);

/* True if the process is dying, a zombie, or not in /proc. */
bool vgpu_process_ended(pid_t pid);

#endif
