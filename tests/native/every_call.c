/*
 * every_call.c: one thread for each driver call that has a wrapper in libvgpu. At one line of input all threads make
 * their call. At the next line the program prints the names of the calls that returned. While the lease is suspended no
 * call returns, because each waits in libvgpu before it does anything else. The arguments are meaningless. Calls of
 * family `answers` are left out, because they wait only if the driver has no answer.
 *
 * every-call failing: makes each call while the driver answers each with an error (fake/failing.c), with null pointers
 * and zeros, and with pointers to zeros. Prints the calls with another answer than that error. The exit status is 0 if
 * the slice has as much free memory as before.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake/failing.h"

typedef long word;
#define WORDS word, word, word, word, word, word, word, word, word, word, word, word

#define HOOK(symbol, library, family, since, what) word symbol(WORDS);
#define USED(symbol, library)
#define OPEN(symbol, family, reason)
#include "hooks.def"
#undef HOOK

word cuCtxSetCurrent(void *);

static struct row {
    const char *name;
    word (*call)(WORDS);
    const char *family;
    const char *library;
    atomic_int came_back;
} rows[] = {
#define HOOK(symbol, library, family, since, what) {#symbol, symbol, #family, #library, 0},
#include "hooks.def"
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

static int is_tried(const struct row *row)
{
    return strcmp(row->library, "CUDA") == 0 && strcmp(row->family, "answers") != 0;
}

static char zeros[1 << 16];
static void *context;

static void *call(void *argument)
{
    struct row *row = argument;
    /* for a batch copy the argument means zero entries; other values would mean a huge number */
    word at = strcmp(row->family, "copy") == 0 ? 0 : (word)zeros;
    cuCtxSetCurrent(context);
    row->call(at, at, at, at, at, at, at, at, at, at, at, at);
    atomic_store(&row->came_back, 1);
    return NULL;
}

/* An address that is small as a number: 131072 entries of any list that begins there are zeros. */
#define LOW 0x20000
#define LOW_BYTES (64 << 20)

static size_t free_bytes(void)
{
    size_t bytes = 0;
    cuMemGetInfo_v2((word)&bytes, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return bytes;
}

/* Makes a call with these arguments. Each call of `failing` fails; NULL: each call of the driver. */
static void refused(const struct row *row, word at, const char *failing)
{
    void (*fail_each)(const char *) = dlsym(RTLD_DEFAULT, "fail_each");
    const char *(*fail_ended)(void) = dlsym(RTLD_DEFAULT, "fail_ended");
    cuCtxSetCurrent(context);
    fail_each(failing);
    int result = (int)row->call(at, at, at, at, at, at, at, at, at, at, at, at);
    fail_ended();
    if (result != FAILURE)
        printf("%s%s %d\n", row->name, at == 0 ? "" : " zeros", result);
}

static int all_fail(void)
{
    const int map = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    if (mmap((void *)LOW, LOW_BYTES, PROT_READ | PROT_WRITE, map, -1, 0) != (void *)LOW)
        return 3;
    cuCtxSetCurrent(context);
    size_t before = free_bytes();
    for (size_t i = 0; i < ROWS; i++)
        if (strcmp(rows[i].library, "CUDA") == 0) {
            refused(&rows[i], 0, NULL);
            refused(&rows[i], LOW, NULL);
            refused(&rows[i], 0, rows[i].name);
            refused(&rows[i], LOW, rows[i].name);
        }
    cuCtxSetCurrent(context);
    return free_bytes() != before;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    pthread_attr_t small;
    int count = 0;
    if (cuInit(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0 ||
        cuDevicePrimaryCtxRetain((word)&context, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0)
        return 1;
    if (argc > 1 && strcmp(argv[1], "failing") == 0)
        return all_fail();
    for (size_t i = 0; i < ROWS; i++)
        count += is_tried(&rows[i]);
    printf("%d\n", count);
    fflush(stdout);
    if (getchar() == EOF)
        return 0;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 16);
    for (size_t i = 0; i < ROWS; i++)
        if (is_tried(&rows[i]) && pthread_create(&thread, &small, call, &rows[i]) != 0)
            return 2;
    if (getchar() == EOF)
        return 0;
    for (size_t i = 0; i < ROWS; i++)
        if (atomic_load(&rows[i].came_back))
            printf("%s ", rows[i].name);
    printf("\n");
    fflush(stdout);
    _exit(0);
}
