/*
 * driver.c, linked to each harness: fuzz-NAME SECONDS RUNS SEED CURRENT CORPUS
 *
 * Runs each file of CORPUS, and then mutations of them until SECONDS are over or RUNS are done. An input that
 * reaches a new edge of the code is mutated further. The file CURRENT holds the input that is running, so it is
 * known after a crash: its length in 4 bytes, then its bytes.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

enum { EDGES = 1 << 16, POOL_MAX = 4096, RUN_TIMEOUT_S = 20 };

struct input {
    uint32_t size;
    uint8_t bytes[FUZZ_INPUT_MAX];
};

static unsigned char seen[EDGES];
static unsigned edges;
static bool fresh;
static struct input *pool[POOL_MAX];
static unsigned pooled;
static struct input *current;
static uint64_t state;
static unsigned long runs;

/*
 * gcc calls this at each edge of code compiled with trace-pc. Threads may call it at the same time; a lost count does
 * no harm.
 */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    uintptr_t at = (uintptr_t)__builtin_return_address(0);
    unsigned char *edge = &seen[(at ^ at >> 16) % EDGES];
    if (*edge == 0) {
        *edge = 1;
        edges++;
        fresh = true;
    }
}

static uint64_t dice(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static uint32_t below(uint32_t end)
{
    return end == 0 ? 0 : (uint32_t)(dice() % end);
}

static void insert(struct input *input, uint32_t at, const void *bytes, uint32_t size)
{
    if (size > FUZZ_INPUT_MAX - input->size)
        size = FUZZ_INPUT_MAX - input->size;
    memmove(input->bytes + at + size, input->bytes + at, input->size - at);
    memcpy(input->bytes + at, bytes, size);
    input->size += size;
}

static void cut(struct input *input, uint32_t at, uint32_t size)
{
    if (size > input->size - at)
        size = input->size - at;
    memmove(input->bytes + at, input->bytes + at + size, input->size - at - size);
    input->size -= size;
}

static void mutate_once(struct input *input)
{
    static const uint64_t edge_values[] = {0,
                                           1,
                                           2,
                                           0x7f,
                                           0xff,
                                           0x100,
                                           0x7fff,
                                           0xffff,
                                           INT32_MAX,
                                           UINT32_MAX,
                                           (uint64_t)INT32_MAX + 1,
                                           INT64_MAX,
                                           UINT64_MAX,
                                           1ull << 62};
    static const unsigned widths[] = {1, 2, 4, 8};
    uint32_t at = below(input->size + 1), words = 0;
    uint64_t value = edge_values[below(sizeof(edge_values) / sizeof(edge_values[0]))];
    unsigned width = widths[below(4)];
    while (fuzz_words[words] != NULL)
        words++;
    switch (below(7)) {
    case 0:
        if (at < input->size)
            input->bytes[at] ^= (uint8_t)(1u << below(8));
        break;
    case 1:
        if (at < input->size)
            input->bytes[at] = (uint8_t)dice();
        break;
    case 2:
        if (at + width <= input->size)
            memcpy(input->bytes + at, &value, width);
        break;
    case 3:
        value = dice();
        insert(input, at, &value, width);
        break;
    case 4:
        cut(input, at, 1 + below(16));
        break;
    case 5:
        if (words > 0) {
            const char *word = fuzz_words[below(words)];
            insert(input, at, word, (uint32_t)strlen(word));
        }
        break;
    default: {
        const struct input *other = pool[below(pooled)];
        uint32_t from = below(other->size + 1);
        insert(input, at, other->bytes + from, below(other->size - from + 1));
    }
    }
}

static void run(const struct input *input)
{
    current->size = input->size;
    memcpy(current->bytes, input->bytes, input->size);
    fresh = false;
    runs++;
    alarm(RUN_TIMEOUT_S); /* an input that never ends is a finding, too */
    LLVMFuzzerTestOneInput(input->bytes, input->size);
    alarm(0);
    if (!fresh || pooled == POOL_MAX)
        return;
    struct input *kept = malloc(sizeof(*kept));
    if (kept != NULL) {
        *kept = *input;
        pool[pooled++] = kept;
    }
}

static void replay(const char *folder)
{
    struct dirent *entry;
    DIR *listing = opendir(folder);
    while (listing != NULL && (entry = readdir(listing)) != NULL) {
        char path[4096];
        struct input input = {0};
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = fd < 0 ? -1 : read(fd, input.bytes, sizeof(input.bytes));
        if (fd >= 0)
            close(fd);
        if (size < 0)
            exit(2);
        input.size = (uint32_t)size;
        run(&input);
    }
    if (listing != NULL)
        closedir(listing);
}

static struct input *map(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(struct input)) != 0)
        return MAP_FAILED;
    return mmap(NULL, sizeof(struct input), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

int main(int argc, char **argv)
{
    if (argc != 6 || (current = map(argv[4])) == MAP_FAILED) {
        fputs("usage: fuzz-NAME SECONDS RUNS SEED CURRENT CORPUS\n", stderr);
        return 2;
    }
    time_t end = time(NULL) + atol(argv[1]);
    unsigned long most = strtoul(argv[2], NULL, 10);
    state = strtoull(argv[3], NULL, 10) * 2 + 1;
    struct input input = {0};
    run(&input);
    if (pooled == 0)
        pool[pooled++] = calloc(1, sizeof(input));
    replay(argv[5]);
    most += runs;
    while (runs < most && time(NULL) < end) {
        input = *pool[below(pooled)];
        for (uint32_t changes = 1 + below(8); changes > 0; changes--)
            mutate_once(&input);
        run(&input);
    }
    printf("%lu runs, %u edges, %u inputs kept\n", runs, edges, pooled);
    return 0;
}
