/* identity.h: a process is identified by its pid and its start time, and during one order by a pidfd. */
#ifndef VGPU_SUSPEND_IDENTITY_H
#define VGPU_SUSPEND_IDENTITY_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * A pidfd of the process with this pid that started at `ticks` (field 22 of /proc/PID/stat, proc(5)). -ESRCH: it has
 * ended; another -errno: its pidfd or its start time could not be read.
 */
int identity_open(pid_t pid, unsigned long ticks);

/* Does the process of the pidfd live? A zombie does not. */
bool identity_alive(int pidfd);

#endif
