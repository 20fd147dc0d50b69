/* vgpu-suspend LOCKFILE NUMBER: suspends and resumes CUDA processes of one tenant, one order a line, one answer a line.
 *
 *   state PID TICKS | lock PID TICKS MILLISECONDS | save PID TICKS | restore PID TICKS [GPU-OLD GPU-NEW]...
 *   | unlock PID TICKS | reach PID TICKS GPU-OLD GPU-NEW | copy PID TICKS DESCRIPTOR
 *
 * TICKS is the start time of the process (identity.h): an order for a process that has ended does nothing, whatever
 * has its pid now, and its answer is "-1 ENDED -1". Else the answer is the driver's result as a number, its name, and
 * the state of the process then (CUprocessState; -1: not known). The first line is "ready", or "error " and the reason.
 * The program ends with its input, after the order under way. The lock of byte NUMBER, the tenant's, makes a second
 * instance for this tenant wait meanwhile, so that no order of an earlier instance is under way when an instance starts
 * after a crash. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "copy.h"
#include "driver.h"
#include "identity.h"

#define WORDS_MAX (3 + 2 * DRIVER_PAIRS_MAX)

static int split(char *line, char **words)
{
    int count = 0;
    char *left = NULL;
    for (char *word = strtok_r(line, " \n", &left); word != NULL; word = strtok_r(NULL, " \n", &left)) {
        if (count == WORDS_MAX)
            return 0;
        words[count++] = word;
    }
    return count;
}

static bool number(const char *word, long most, long *value)
{
    char *end;
    errno = 0;
    *value = strtol(word, &end, 10);
    return errno == 0 && *end == '\0' && end != word && *value >= 0 && *value <= most;
}

static CUresult restore(int pid, char **words, int count)
{
    CUcheckpointGpuPair pairs[DRIVER_PAIRS_MAX];
    if (count % 2 != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < count / 2; i++)
        if (!driver_uuid(words[2 * i], &pairs[i].oldUuid) || !driver_uuid(words[2 * i + 1], &pairs[i].newUuid))
            return CUDA_ERROR_INVALID_VALUE;
    return driver_restore(pid, pairs, (unsigned int)count / 2);
}

static CUresult reach(int pidfd, char **words)
{
    CUuuid from, to;
    if (!driver_uuid(words[0], &from) || !driver_uuid(words[1], &to))
        return CUDA_ERROR_INVALID_VALUE;
    return copy_reach(pidfd, &from, &to);
}

static CUresult carry_out(int pid, int pidfd, char **words, int count)
{
    long milliseconds, descriptor;
    if (strcmp(words[0], "reach") == 0 && count == 5)
        return reach(pidfd, words + 3);
    if (strcmp(words[0], "copy") == 0 && count == 4 && number(words[3], INT_MAX, &descriptor))
        return copy_list(pidfd, (int)descriptor);
    if (strcmp(words[0], "lock") == 0 && count == 4 && number(words[3], 1 << 30, &milliseconds))
        return driver_lock(pid, (unsigned int)milliseconds);
    if (strcmp(words[0], "restore") == 0)
        return restore(pid, words + 3, count - 3);
    if (count == 3 && strcmp(words[0], "save") == 0) {
        copy_open();
        return driver_save(pid);
    }
    if (count == 3 && strcmp(words[0], "unlock") == 0)
        return driver_unlock(pid);
    return count == 3 && strcmp(words[0], "state") == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void say(CUresult result, int state)
{
    printf("%d %s %d\n", (int)result, driver_name(result), state);
}

/*
 * Carries out one order and prints the answer. The driver knows processes only by pid. If the process of the pidfd
 * lives before and after a driver call, the pid belonged to that process during the call.
 */
static void answer(char *line)
{
    char *words[WORDS_MAX];
    long pid, ticks;
    CUprocessState state;
    int count = split(line, words);
    if (count < 3 || !number(words[1], 1 << 30, &pid) || pid == 0 || !number(words[2], LONG_MAX, &ticks)) {
        say(CUDA_ERROR_INVALID_VALUE, -1);
        return;
    }
    int pidfd = identity_open((pid_t)pid, (unsigned long)ticks);
    if (pidfd < 0 && pidfd != -ESRCH) {
        say(CUDA_ERROR_OPERATING_SYSTEM, -1);
        return;
    }
    CUresult result = pidfd < 0 ? CUDA_ERROR_INVALID_VALUE : carry_out((int)pid, pidfd, words, count);
    CUresult known = pidfd < 0 ? CUDA_ERROR_INVALID_VALUE : driver_state((int)pid, &state);
    if (pidfd < 0 || !identity_alive(pidfd))
        printf("-1 ENDED -1\n");
    else
        say(result == CUDA_SUCCESS ? known : result, known == CUDA_SUCCESS ? (int)state : -1);
    if (pidfd >= 0)
        close(pidfd);
}

static bool alone(const char *path, long tenant)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = tenant, .l_len = 1};
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0)
        return false;
    while (fcntl(descriptor, F_SETLKW, &lock) != 0)
        if (errno != EINTR)
            return false;
    return true; /* keeps the descriptor open: the lock ends with the process */
}

int main(int argc, char **argv)
{
    char *line = NULL;
    size_t room = 0;
    long tenant;
    if (argc != 3 || !number(argv[2], LONG_MAX - 1, &tenant)) {
        fprintf(stderr, "usage: vgpu-suspend LOCKFILE NUMBER\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *why = driver_open();
    if (why != NULL) {
        printf("error %s\n", why);
        return 1;
    }
    if (!alone(argv[1], tenant)) {
        printf("error the lock file cannot be taken: %s\n", strerror(errno));
        return 1;
    }
    printf("ready\n");
    while (getline(&line, &room, stdin) > 0)
        answer(line);
    copy_wait();
    free(line);
    return 0;
}
