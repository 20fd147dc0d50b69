#include "receiver.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

union control {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
};

static bool is_pidfd(int fd)
{
    char name[32];
    char path[64];
    snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof(path) - 1);
    path[size > 0 ? size : 0] = '\0';
    return strcmp(path, "anon_inode:[pidfd]") == 0 || strncmp(path, "pidfd:", strlen("pidfd:")) == 0;
}

int receiver_run(size_t most)
{
    char data[256];
    union control control = {0};
    struct iovec part = {.iov_base = data, .iov_len = most < sizeof(data) ? most : sizeof(data)};
    /* CMSG_SPACE is rounded up, and has room for two descriptors */
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
    ssize_t size = recvmsg(RECEIVER_CALLER, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0 || (message.msg_flags & MSG_CTRUNC))
        return EXIT_FAILURE;
    const struct cmsghdr *item = CMSG_FIRSTHDR(&message);
    int fd = -1;
    if (item != NULL) {
        if (item->cmsg_type != SCM_RIGHTS || item->cmsg_len != CMSG_LEN(sizeof(int)))
            return EXIT_FAILURE;
        memcpy(&fd, CMSG_DATA(item), sizeof(fd));
    }
    part.iov_len = (size_t)size;
    struct msghdr answer = {.msg_iov = &part, .msg_iovlen = 1};
    union control checked = {0};
    if (fd >= 0 && is_pidfd(fd)) {
        checked.head = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&checked.head), &fd, sizeof(fd));
        answer.msg_control = &checked;
        answer.msg_controllen = CMSG_LEN(sizeof(int));
    }
    return sendmsg(RECEIVER_VGPUD, &answer, MSG_NOSIGNAL) == size ? EXIT_SUCCESS : EXIT_FAILURE;
}
