/* What the parts of the conformance tour share: finding the driver's functions, and saying an answer. */
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

/* A question that the driver does not survive is answered with CRASHED, and the tour goes on. */
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

void mark(void);             /* what is free now */
void used(const char *name); /* says how much less it is than at the mark */
CUresult alloc(CUdeviceptr *p, size_t n);
CUresult drop(CUdeviceptr p);

CUresult launch(CUstream stream, unsigned grid, unsigned block, unsigned shared);

/* cuda_conformance_objects.c: with the primary context `ctx` current */
void objects(CUcontext ctx);

/* cuda_conformance_captures.c: the same */
void captures(CUcontext ctx);

#endif
