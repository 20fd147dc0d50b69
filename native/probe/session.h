/* session.h: opens one device and makes its primary context current, and prints results. */
#ifndef PROBE_SESSION_H
#define PROBE_SESSION_H

#include "commands.h"
#include "driver.h"

/*
 * Calls cuInit and makes the device's primary context current. Returns STATUS_OK, or the exit status after an error
 * line was printed.
 */
int session_open(int device);

/* Prints {"state": "error", "call": ..., "result": ...} and returns the exit status for it. */
int session_error(const char *call, CUresult result);

const char *result_name(CUresult result);

/*
 * Prints the common part of a line about the device: uuid, total, free, pid, and whether libvgpu is in the process;
 * without braces and newline.
 */
void print_device(int device);

/* Ends a line and flushes it: the reader may be waiting for it. */
void print_end(void);

void wait_as_asked(const struct options *options);

#endif
