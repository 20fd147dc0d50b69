/* commands.h: the commands of vgpu-probe. Each prints one JSON object per line and returns the exit status. */
#ifndef PROBE_COMMANDS_H
#define PROBE_COMMANDS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    STATUS_OK = 0,
    STATUS_FAILED = 1, /* exit status: the data read back was wrong, or a driver error was unexpected */
    STATUS_USAGE = 2,
    STATUS_NO_DRIVER = 3,
    STATUS_NO_MEMORY = 4, /* exit status: the driver (or the limiter) reported that memory is short */
    STATUS_NOT_PERMITTED = 5,
};

struct options {
    const char *family; /* family of allocation calls: alloc, pitch, managed, async, vmm, array */
    int device;
    uint64_t bytes;
    uint64_t piece_bytes;
    double seconds;
    bool wait_for_stdin;
    bool keep;
    uint64_t rounds;
};

int command_info(const struct options *options);
int command_hold(const struct options *options);
int command_fill(const struct options *options);
int command_churn(const struct options *options);
int command_run(const struct options *options);
int command_ok(const struct options *options);

#endif
