/* commands.h: the commands of vgpu-probe. Each prints one JSON object a line and returns the exit status. */
#ifndef PROBE_COMMANDS_H
#define PROBE_COMMANDS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    STATUS_OK = 0,
    STATUS_FAILED = 1, /* data came back wrong, or an unexpected driver error */
    STATUS_USAGE = 2,
    STATUS_NO_DRIVER = 3,
    STATUS_NO_MEMORY = 4, /* the driver (or the limiter) said out of memory */
    STATUS_NOT_PERMITTED = 5,
};

struct options {
    const char *family; /* of allocation calls: alloc, pitch, managed, async, vmm, array */
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
