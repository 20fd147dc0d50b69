/*
 * vgpu-probe: a small client of the CUDA driver API, for the demo, the tests and real GPUs. Its `usage` text describes
 * the commands.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "allocate.h"
#include "commands.h"
#include "driver.h"

#ifdef PROBE_LINKED
#define DEFAULT_WAY WAY_DIRECT
#else
#define DEFAULT_WAY WAY_DLSYM
#endif

static const char usage[] =
    "usage: vgpu-probe [OPTIONS] COMMAND\n"
    "A CUDA program that uses memory and launches kernels; prints one JSON object a line.\n\n"
    "commands:\n"
    "  info                  the device as this process sees it\n"
    "  hold BYTES            allocates, as in 512MiB, and holds it for --seconds or until standard input ends\n"
    "  fill                  allocates pieces until one is refused\n"
    "  churn ROUNDS          allocates and frees at random\n"
    "  run --seconds S       launches kernels, and says how many a second\n"
    "  ok                    allocates, fills, copies back and compares\n\n"
    "options:\n"
    "  --device N            the CUDA device (default 0)\n"
    "  --family F            how it allocates: alloc (default), pitch, managed, async, vmm, array\n"
    "  --piece BYTES         of fill and churn (default 32MiB)\n"
    "  --keep                fill holds what it has\n"
    "  --seconds S           how long hold and run last\n"
    "  --then-wait-on-stdin  hold, fill and churn wait until standard input ends\n"
    "  --via WAY             how it finds the driver's functions: direct, dlsym, proc\n"
    "  --help                this text\n";

static bool parse_bytes(const char *text, uint64_t *bytes)
{
    static const struct {
        const char *suffix;
        unsigned shift;
    } units[] = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    char *end;
    uint64_t number = strtoull(text, &end, 10);
    if (end == text || text[0] == '-')
        return false;
    for (unsigned i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (strcmp(end, units[i].suffix) == 0) {
            *bytes = number << units[i].shift;
            return *bytes >> units[i].shift == number;
        }
    return false;
}

static bool parse_way(const char *text, enum way *way)
{
    static const char *const names[] = {"direct", "dlsym", "proc"};
    for (int i = 0; i < 3; i++)
        if (strcmp(text, names[i]) == 0) {
            *way = (enum way)i;
            return true;
        }
    return false;
}

static bool parse_options(int argc, char **argv, struct options *options, enum way *way)
{
    static const struct option names[] = {{"via", required_argument, NULL, 'v'},
                                          {"dlsym", no_argument, NULL, 'l'},
                                          {"device", required_argument, NULL, 'd'},
                                          {"family", required_argument, NULL, 'f'},
                                          {"piece", required_argument, NULL, 'p'},
                                          {"seconds", required_argument, NULL, 's'},
                                          {"then-wait-on-stdin", no_argument, NULL, 'w'},
                                          {"keep", no_argument, NULL, 'k'},
                                          {0}};
    bool good = true;
    for (int name; good && (name = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (name == 'v')
            good = parse_way(optarg, way);
        else if (name == 'l')
            *way = WAY_DLSYM;
        else if (name == 'd')
            options->device = atoi(optarg);
        else if (name == 'f')
            options->family = optarg;
        else if (name == 'p')
            good = parse_bytes(optarg, &options->piece_bytes) && options->piece_bytes > 0;
        else if (name == 's')
            options->seconds = strtod(optarg, NULL);
        else if (name == 'w')
            options->wait_for_stdin = true;
        else if (name == 'k')
            options->keep = true;
        else
            good = false;
    }
    return good && family_known(options->family);
}

static int dispatch(const char *command, const char *argument, struct options *options)
{
    if (strcmp(command, "info") == 0)
        return command_info(options);
    if (strcmp(command, "hold") == 0)
        return argument != NULL && parse_bytes(argument, &options->bytes) ? command_hold(options) : STATUS_USAGE;
    if (strcmp(command, "fill") == 0)
        return command_fill(options);
    if (strcmp(command, "churn") == 0)
        return argument != NULL && parse_bytes(argument, &options->rounds) ? command_churn(options) : STATUS_USAGE;
    if (strcmp(command, "run") == 0)
        return options->seconds > 0 ? command_run(options) : STATUS_USAGE;
    if (strcmp(command, "ok") == 0)
        return command_ok(options);
    return STATUS_USAGE;
}

int main(int argc, char **argv)
{
    struct options options = {.family = "alloc", .piece_bytes = 32u << 20};
    enum way way = DEFAULT_WAY;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(usage, stdout);
        return 0;
    }
    if (!parse_options(argc, argv, &options, &way) || optind >= argc) {
        fputs(usage, stderr);
        return STATUS_USAGE;
    }
    if (!driver_load(way))
        return STATUS_NO_DRIVER;
    return dispatch(argv[optind], optind + 1 < argc ? argv[optind + 1] : NULL, &options);
}
