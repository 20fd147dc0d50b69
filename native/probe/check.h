/* check.h: for programs that exit with a JSON error when a driver call fails. Include cuda.h before it. */
#ifndef VGPU_PROBE_CHECK_H
#define VGPU_PROBE_CHECK_H

#include <stdio.h>
#include <stdlib.h>

static inline void check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    printf("{\"state\": \"error\", \"call\": \"%s\", \"result\": %d}\n", what, (int)result);
    fflush(stdout);
    exit(1);
}

#endif
