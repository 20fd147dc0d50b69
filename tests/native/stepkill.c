/*
 * stepkill.c: kills a process with SIGKILL at a chosen instruction of libvgpu.
 *
 *   stepkill PID STEPS    steps the process until it is in libvgpu, then STEPS instructions of libvgpu further
 *
 * Prints the offset in libvgpu of the last instruction. Exit status 3: tracing is not permitted. 4: the process did
 * not enter libvgpu.
 */
#include <elf.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define OUTSIDE_MAX 200 /* after this many steps outside of libvgpu the process runs freely */
#define RUN_US 100      /* microseconds for which the process then runs freely before the next steps */
#define RUNS_MAX 200

/* Finds the addresses of libvgpu's code in the process. */
static int find_code(pid_t pid, uint64_t *start, uint64_t *end)
{
    char path[64];
    char line[4096];
    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "r");
    if (maps == NULL)
        return 0;
    int found = 0;
    while (!found && fgets(line, sizeof(line), maps) != NULL)
        found = strstr(line, " r-xp ") != NULL && strstr(line, "/libvgpu.so") != NULL &&
                sscanf(line, "%" SCNx64 "-%" SCNx64, start, end) == 2;
    fclose(maps);
    return found;
}

static uint64_t instruction(pid_t pid)
{
#if defined(__x86_64__)
    return (uint64_t)ptrace(PTRACE_PEEKUSER, pid, (void *)(16 * sizeof(long)), NULL); /* offset of the register rip */
#else
    struct {
        uint64_t x[31], sp, pc, state;
    } registers;
    struct iovec all = {&registers, sizeof(registers)};
    return ptrace(PTRACE_GETREGSET, pid, (void *)NT_PRSTATUS, &all) == 0 ? registers.pc : 0;
#endif
}

static int stopped(pid_t pid, int *status)
{
    return waitpid(pid, status, __WALL) == pid && WIFSTOPPED(*status);
}

/* Lets the stopped process run for RUN_US microseconds, and stops it again. */
static int run_on(pid_t pid, int *status)
{
    if (ptrace(PTRACE_CONT, pid, NULL, NULL) != 0)
        return 0;
    usleep(RUN_US);
    return ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) == 0 && stopped(pid, status);
}

int main(int argc, char **argv)
{
    uint64_t start;
    uint64_t end;
    int status;
    pid_t pid = argc == 3 ? atoi(argv[1]) : 0;
    long left = argc == 3 ? atol(argv[2]) : 0;
    if (pid <= 0 || !find_code(pid, &start, &end))
        return 2;
    alarm(30); /* the alarm ends this program if the process sleeps in a system call and so makes no steps */
    if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) != 0 || ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) != 0)
        return 3;
    if (!stopped(pid, &status))
        return 3;
    for (int runs = 0; runs < RUNS_MAX; runs++) {
        for (int outside = 0; outside < OUTSIDE_MAX; outside++) {
            uint64_t at = instruction(pid);
            if (at >= start && at < end) {
                outside = 0;
                if (left-- <= 0) {
                    kill(pid, SIGKILL);
                    waitpid(pid, &status, __WALL);
                    printf("%" PRIx64 "\n", at - start);
                    return 0;
                }
            }
            if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) != 0 || !stopped(pid, &status))
                return 4;
        }
        if (!run_on(pid, &status))
            return 4;
    }
    kill(pid, SIGKILL);
    return 4;
}
