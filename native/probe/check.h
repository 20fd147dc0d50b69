/* check.h: for programs that exit with an error in JSON when a driver call fails. cuda.h must be included before it. */
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
