/*
 * dying.h: recognises processes that are dying.
 *
 * Any thread may call these functions; each opens and closes one file of /proc.
 */
#ifndef VGPU_DYING_H
#define VGPU_DYING_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * Is the process dying? The kernel releases a dying process's locks while it closes its files. Only then it closes
 * NVIDIA's files and frees the card's memory, which takes tens of milliseconds. Until the process has ended, its memory
 * is on the card although no process holds its slot. Returns false for a process that is alive, has ended, is a zombie
 * with all files closed, or is not in /proc.
 */
bool vgpu_process_dying(pid_t pid);

/* Returns true if the process is dying, a zombie, or not in /proc. */
bool vgpu_process_ended(pid_t pid);

#endif
