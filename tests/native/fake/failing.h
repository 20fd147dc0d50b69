/* failing.h: what failing.c has besides the driver's functions. */
#ifndef FAILING_H
#define FAILING_H

#include <stdbool.h>

#define API __attribute__((visibility("default")))
#define FAILURE 714 /* CUDA_ERROR_HARDWARE_STACK_ERROR: nothing that runs without a device answers it */

enum fail_kind { FAIL_CALL, FAIL_MEMORY };

/* The n-th call of the driver, or the n-th allocation by libvgpu, that this thread makes from here fails. */
void fail_next(enum fail_kind kind, int call);
/* Each call of this function of the driver fails; NULL: of any function. */
void fail_each(const char *function);
/* The first call of this function fails that other threads than this one make from here. */
void fail_elsewhere(const char *function);
/* Returns whether no such call was made yet. None fails any more. */
int fail_is_due(void);
/* From here on no call fails. Returns the name of the call that failed last, or NULL. */
const char *fail_ended(void);
/* Bytes that the driver itself says are free on the current device. */
unsigned long fail_driver_free(void);

#endif
