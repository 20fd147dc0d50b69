/*
 * every_call.c: a thread for each call of the driver that libvgpu has a wrapper of. For a line of input all of them
 * call, and for the next one the names of those that came back are printed: none, while the lease is away, as they wait
 * before they do anything else. What they call it with is nothing that a call could work with. Those of family
 * `answers` wait only where the driver has no answer, and are not among them.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
    word at = strcmp(row->family, "copy") == 0 ? 0 : (word)zeros; /* a batch of no copies, else of very many */
    cuCtxSetCurrent(context);
    row->call(at, at, at, at, at, at, at, at, at, at, at, at);
    atomic_store(&row->came_back, 1);
    return NULL;
}

int main(void)
{
    pthread_t thread;
    pthread_attr_t small;
    int count = 0;
    if (cuInit(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0 ||
        cuDevicePrimaryCtxRetain((word)&context, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0)
        return 1;
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
