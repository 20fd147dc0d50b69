/* carry.h: copies all movable memory of the process to the host and back, several chunks in flight. For one thread, that
 * of swap.h, which has made sure that nobody is inside. */
#ifndef VGPU_CARRY_H
#define VGPU_CARRY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_api.h"

/* Takes chunks out until no more than `kept` bytes are on the device; each one's physical memory is released when
 * its copy is whole. What is out already stays out. False: some chunks may be out, see vgpu_carry_error. */
bool vgpu_carry_out(uint64_t kept);

/* Bytes of movable memory, and how many of them are on the device. */
struct vgpu_carry_bytes {
    uint64_t all;
    uint64_t here;
};
struct vgpu_carry_bytes vgpu_carry_count(void);

/* Brings back the chunks that are out. False: not all are here, as the card is full, say, or `stop` says so; the next
 * call goes on, or vgpu_carry_in_undo puts them out again, whose copies are still true. */
bool vgpu_carry_in(bool (*stop)(void));
void vgpu_carry_in_undo(void);

/* The last error that there was. */
CUresult vgpu_carry_error(void);

/* A context ends, and with it what is used of it here. */
void vgpu_carry_forget(CUcontext context);

/* Where the bytes of the host's buffer are told. */
void vgpu_carry_start(uint64_t *host_bytes);

#endif
