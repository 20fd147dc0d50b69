/*
 * cuda_conformance.h: shared by the conformance program's parts: look-up of the driver's functions, output of results.
 */
#ifndef CUDA_CONFORMANCE_H
#define CUDA_CONFORMANCE_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define CALL(name, type, ...) ((CUresult(*) type)need(#name))(__VA_ARGS__)

void *need(const char *name);
void said(const char *name, long long value);

/* The result of a call that crashes the driver. The program continues after such a call. */
enum { CRASHED = -11 };
extern sigjmp_buf question;
extern volatile int asking;
#define say(name, value)                            \
    do {                                            \
        if (sigsetjmp(question, 1) == 0) {          \
            asking = 1;                             \
            long long answer_ = (long long)(value); \
            asking = 0;                             \
            said(name, answer_);                    \
        } else {                                    \
            said(name, CRASHED);                    \
        }                                           \
    } while (0)

void mark(void);             /* mark() notes the device's free memory */
void used(const char *name); /* prints how much less is free than at mark() */
CUresult alloc(CUdeviceptr *p, size_t n);
CUresult drop(CUdeviceptr p);

CUresult launch(CUstream stream, unsigned grid, unsigned block, unsigned shared);

/* prints the results for objects (cuda_conformance_objects.c); `ctx`, the primary context, is current */
void objects(CUcontext ctx);

/* prints the results for captures (cuda_conformance_captures.c); `ctx` is current */
void captures(CUcontext ctx);

#endif
