#include "dying.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PF_EXITING 4u /* flag in field 9 of /proc/PID/stat (proc(5)), from include/linux/sched.h */
#define STATE_FIELD 3
#define FLAGS_FIELD 9
#define THREADS_FIELD 20

/*
 * Returns the start of a field of /proc/PID/stat, or an empty string. A process name may contain any character, so
 * fields are counted after the name.
 */
static const char *field(const char *text, int number)
{
    const char *at = strrchr(text, ')');
    for (int now = STATE_FIELD - 1; at != NULL && now < number; now++) {
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    return at != NULL ? at : "";
}

enum life { GONE, DYING, ALIVE };

static enum life life(pid_t pid)
{
    char text[1024];
    snprintf(text, sizeof(text), "/proc/%ld/stat", (long)pid);
    int fd = pid > 0 ? open(text, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return GONE;
    ssize_t size = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (size <= 0) /* nothing could be read: the process has ended since open(2) */
        return GONE;
    text[size] = '\0';
    if ((strtoul(field(text, FLAGS_FIELD), NULL, 10) & PF_EXITING) == 0)
        return ALIVE;
    char state = *field(text, STATE_FIELD);
    /* if the process has other threads, they still keep its files open */
    bool alone = strtoul(field(text, THREADS_FIELD), NULL, 10) <= 1;
    return alone && (state == 'Z' || state == 'X') ? GONE : DYING;
}

bool vgpu_process_dying(pid_t pid)
{
    return life(pid) == DYING;
}

bool vgpu_process_ended(pid_t pid)
{
    return life(pid) != ALIVE;
}
