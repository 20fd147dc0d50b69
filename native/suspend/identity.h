/* Identifies a process by its pid and its start time, and by a pidfd while one order runs. */
#ifndef VGPU_SUSPEND_IDENTITY_H
#define VGPU_SUSPEND_IDENTITY_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * Opens a pidfd of the process with this pid that started at `ticks` (field 22 of /proc/PID/stat, proc(5)). -ESRCH:
 * that process has ended; another -errno: the pidfd or the start time could not be read.
 */
int identity_open(pid_t pid, unsigned long ticks);

/* Returns true if the process of the pidfd lives; a zombie does not. */
bool identity_alive(int pidfd);

#endif
