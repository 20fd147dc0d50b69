/*
 * dies_at.c: preloaded before libvgpu. Kills the process with SIGKILL at a call of the C library that libvgpu makes for
 * its connection to the arbiter. DIES_AT names the call (socket, connect, send, recv), and DIES_WHEN is "before" or
 * "after".
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

static void die(const char *call, const char *when)
{
    const char *at = getenv("DIES_AT");
    const char *named = getenv("DIES_WHEN");
    if (at != NULL && named != NULL && strcmp(at, call) == 0 && strcmp(named, when) == 0)
        raise(SIGKILL);
}

#define CALL(result_type, name, parameters, ...)                                            \
    __attribute__((visibility("default"))) result_type name parameters                      \
    {                                                                                       \
        result_type(*real) parameters = (result_type(*) parameters)dlsym(RTLD_NEXT, #name); \
        die(#name, "before");                                                               \
        result_type result = real(__VA_ARGS__);                                             \
        die(#name, "after");                                                                \
        return result;                                                                      \
    }

CALL(int, socket, (int domain, int type, int protocol), domain, type, protocol)
CALL(int, connect, (int fd, const struct sockaddr *address, socklen_t size), fd, address, size)
CALL(ssize_t, send, (int fd, const void *data, size_t size, int flags), fd, data, size, flags)
CALL(ssize_t, recv, (int fd, void *data, size_t size, int flags), fd, data, size, flags)
