/*
 * channels.h: takes the channels of a tenant's processes off a device and puts them back, from outside, by the
 * driver's own call (rm.h). A call blocks for up to half a millisecond, so each device has a thread for it.
 *
 * The driver knows a client by its open file, so the call goes through the process's own: taken by
 * pidfd_getfd(2) for the moment of the call only, since an open file keeps the memory of its client allocated.
 * What a process lists is hostile input: a file that is not the control device is not called, and every channel
 * of a call is named as one of the client that the call is for, which the driver checks against the file.
 *
 * The functions are called by the loop's thread; an order is the device's thread's from channels_submit until `done`.
 *
 * To take a file waits for the end of the process's exec, and to close it asks its file system, which may be the
 * tenant's own (FUSE): a thread that stays in one of these is left there, and the device gets another. Until it comes
 * back, no more orders for that tenant are carried out.
 */
#ifndef ARBITER_CHANNELS_H
#define ARBITER_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"
#include "loop.h"

#define CHANNELS_PROCESS_CALLS_MAX 64u /* what one process can cost at most; more is an error */
#define CHANNELS_ORDER_NS_MAX \
    100000000u                    /* what one order can: a call takes up to 0.5 ms, and a lease has 256 processes */
#define CHANNELS_GROUPS_MAX 4096u /* that are read for one order */

/* The groups of one process on one device. */
struct channels_process {
    int pidfd; /* of its own: closed with the order */
    uint32_t count;
    uint32_t slot;
    uint32_t off;                      /* as the table says */
    struct vgpu_channel_group *groups; /* once the order was carried out: those of calls that were not refused */
};

/* One order for one device's thread; freed by channels_order_free. */
struct channels_order {
    struct channels_order *next;
    bool off;
    uint32_t process_count;
    struct channels_process *processes;
    void *owner;     /* the caller's */
    uint64_t tenant; /* the same number for all leases of a tenant */
    uint32_t ordinal;
    /* the answer */
    uint32_t calls;
    uint32_t failed; /* calls that were refused */
    uint32_t status; /* of the last refusal: the driver's, or 0 */
    int error;       /* errno of the last refusal, or 0 */
    uint64_t began_ns;
    uint64_t first_ended_ns; /* the first of its calls; 0: there was none */
    uint64_t last_began_ns;
    uint64_t ended_ns;
};

/* `path`: the control device. `done` is called from the loop, for each order that was carried out. 0 or -errno. */
int channels_open(const char *path, void (*done)(struct channels_order *order));

/* Looks what the control device is. The driver may be loaded after the arbiter has started, so this is asked before the
 * first order for a device. False: there is none, and no call can be made. */
bool channels_device(void);

struct channels_thread;

/* A thread for one device; NULL: out of memory. Devices do not go, so neither does it. */
struct channels_thread *channels_thread_start(void);

/* Hands the order over; it comes back by `done`. Orders of a thread are carried out in their order. */
void channels_submit(struct channels_thread *thread, struct channels_order *order);

void channels_order_free(struct channels_order *order);

/* Gives up an order that stays in a file or an exec of the tenant's: it comes back by `done`, with ETIMEDOUT. Returns
 * when to look again (CLOCK_MONOTONIC, nanoseconds), UINT64_MAX: the thread has nothing to do. */
uint64_t channels_check(struct channels_thread *thread, uint64_t now);

/* A thread is still in an order of this tenant's that was given up. */
bool channels_barred(uint64_t tenant);

/* Puts the groups of a process on the device `uuid` that the table of its slot lists into `process`. False: it has
 * none, or the table cannot be read, or has more than *budget groups, from which what is read is taken.
 * `process->groups` is to be freed. */
bool channels_read(int usage_fd, uint32_t slot, const uint8_t uuid[16], uint32_t *budget,
                   struct channels_process *process);

/* Which of `count` devices the table of a slot lists, as bits. *groups: how many groups it has. */
uint32_t channels_devices(int usage_fd, uint32_t slot, const uint8_t *const uuids[], uint32_t count, uint32_t *groups);

/* Writes the table's word of a slot about one device. */
void channels_note_off(int usage_fd, uint32_t slot, uint32_t ordinal, bool off);

/* What a process has counted of its looks at its own work so far. False: its table cannot be read. */
struct channels_load {
    uint32_t samples;
    uint32_t unfinished;
    uint32_t groups; /* on all devices; each is given time slices by the driver */
};
bool channels_load(int usage_fd, uint32_t slot, struct channels_load *load);

/* The 16 bytes of "GPU-..."; false: it is no such text. */
bool channels_uuid(const char *text, uint8_t uuid[16]);

#endif
