/*
 * fuzz_reply.c: how vgpu-hook and vgpu-runtime read replies on runtime.sock, where the peer may be another program than
 * vgpud.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "door.h"
#include "fuzz.h"

const char *const fuzz_words[] = {"VGRT", NULL}; /* the magic number in this machine's byte order */

static char folder[] = "/tmp/fuzz-reply-XXXXXX";
static int listener = -1;
static const uint8_t *bytes;
static size_t count;

static void remove_folder(void)
{
    char path[sizeof(folder) + sizeof(VGPU_DOOR_SOCKET) + 1];
    snprintf(path, sizeof(path), "%s/%s", folder, VGPU_DOOR_SOCKET);
    unlink(path);
    rmdir(folder);
}

static void begin(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (mkdtemp(folder) == NULL)
        abort();
    atexit(remove_folder);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", folder, VGPU_DOOR_SOCKET);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(listener, 8) != 0)
        abort();
}

static void *answer(void *unused)
{
    char sink[256];
    int fd = accept(listener, NULL, NULL);
    /*
     * reads the request first, because an earlier close would reset the connection and the client would repeat the call
     */
    for (size_t got = 0; got < sizeof(struct vgpu_door_request) + 2;) {
        ssize_t part = read(fd, sink, sizeof(sink));
        if (part <= 0)
            break;
        got += (size_t)part;
    }
    if (count > 0)
        (void)!write(fd, bytes, count);
    close(fd);
    return unused;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *reply = NULL;
    size_t length = 0;
    pthread_t peer;
    struct vgpu_door_call call = {
        .run_dir = folder, .verb = VGPU_DOOR_END, .id = "a1", .pidfd = -1, .patience_s = -1, .answer_s = 10};
    if (listener < 0)
        begin();
    bytes = data;
    count = size;
    if (pthread_create(&peer, NULL, answer, NULL) != 0)
        abort();
    int status = vgpu_door_call(&call, &reply, &length);
    pthread_join(peer, NULL);
    if (status >= 0 && (reply == NULL || reply[length] != '\0' || length > size))
        abort();
    free(reply);
    return 0;
}
