/* The other roles of the program: the control shell, and the server process. */
#include "mps.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

const char *pipe_directory(void)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    return directory == NULL ? "/tmp/nvidia-mps" : directory;
}

static int connect_control(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (snprintf(address.sun_path, sizeof(address.sun_path), "%s/control", pipe_directory()) >=
        (int)sizeof(address.sun_path))
        return -1;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/*
 * Prints a reply. It arrives as a line with its length in bytes, and the bytes. Returns false if the connection ends
 * before. Sets *silent if the reply is empty.
 */
static bool print_reply(FILE *from, bool *silent)
{
    char head[32], buffer[1024];
    if (fgets(head, sizeof(head), from) == NULL)
        return false;
    size_t left = strtoul(head, NULL, 10);
    *silent = left == 0;
    while (left > 0) {
        size_t n = fread(buffer, 1, left < sizeof(buffer) ? left : sizeof(buffer), from);
        if (n == 0)
            return false;
        fwrite(buffer, 1, n, stdout);
        left -= n;
    }
    fflush(stdout);
    return true;
}

int control_shell(void)
{
    char line[1024];
    int fd = connect_control();
    FILE *stream = fd < 0 ? NULL : fdopen(fd, "r+e");
    if (stream == NULL) {
        fprintf(stderr, "Cannot find MPS control daemon process\n");
        return 1;
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        size_t n = strcspn(line, "\n");
        line[n] = '\n';
        bool silent = false;
        if (send(fd, line, n + 1, MSG_NOSIGNAL) < 0 || !print_reply(stream, &silent)) {
            fprintf(stderr, "Cannot find MPS control daemon process\n");
            fclose(stream);
            return 1;
        }
        if (strncmp(line, "quit", 4) == 0 && silent) { /* accepted: returns when the daemon has ended */
            while (read(fd, line, sizeof(line)) > 0)
                continue;
            break;
        }
    }
    fclose(stream);
    return 0;
}

/* The server process: it ends shortly after its control daemon, as on a real node. */
int server_main(pid_t control)
{
    prctl(PR_SET_NAME, "nvidia-cuda-mps");
    while (getppid() == control)
        nanosleep(&(struct timespec){0, 250000000}, NULL);
    nanosleep(&(struct timespec){1, 0}, NULL);
    return 0;
}
