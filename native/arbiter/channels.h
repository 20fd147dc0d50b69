/*
 * channels.h: disables and enables the channels of a tenant's processes on a device by a call of the driver (rm.h),
 * without help of the tenant. A call blocks for up to half a millisecond, so each device has a thread for it.
 *
 * The driver identifies a client by its open file, so the call is made on a copy of the process's file, made by
 * pidfd_getfd(2). The copy exists only during the call, because an open file keeps its client's memory allocated. The
 * list of channels is hostile input: a file other than the control device is not called, and the driver refuses
 * channels that do not belong to the file's client.
 *
 * The functions are called by the loop's thread; an order is the device's thread's from channels_submit until `done`.
 *
 * Copying a file waits for the end of the process's exec, and closing it asks its file system, which may be the
 * tenant's own (FUSE). A thread that hangs in one of these is abandoned, and the device gets another. Until it returns,
 * no more orders for that tenant are carried out.
 */
#ifndef ARBITER_CHANNELS_H
#define ARBITER_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"
#include "loop.h"

#define CHANNELS_PROCESS_CALLS_MAX 64u   /* most calls for one process in one order; more is an error */
#define CHANNELS_ORDER_NS_MAX 100000000u /* longest order: a call takes up to 0.5 ms, and a lease has 256 processes */
#define CHANNELS_GROUPS_MAX 4096u        /* most groups that are read for one order */

/* The groups of one process on one device. */
struct channels_process {
    int pidfd; /* owned by this struct: closed with the order */
    uint32_t count;
    uint32_t slot;
    uint32_t off;                      /* the state in the table */
    struct vgpu_channel_group *groups; /* afterwards: the groups whose call was made */
};

/* One order for one device's thread; freed by channels_order_free. */
struct channels_order {
    struct channels_order *next;
    bool off;
    uint32_t process_count;
    struct channels_process *processes;
    void *owner;     /* for the caller's use */
    uint64_t tenant; /* the same number for all leases of a tenant */
    uint32_t ordinal;
    /* the result */
    uint32_t calls;
    /* Calls that were not made: the process has no such file. It is in its exit (EBADF before Linux 6.9, then ESRCH) or
     * was in an exec, and its channels went with the file; or its table is false. */
    uint32_t missing;
    uint32_t failed; /* calls that the driver refused */
    uint32_t status; /* the driver's status of the last refusal, or 0 */
    int error;       /* errno of the last refusal, or 0 */
    uint64_t began_ns;
    uint64_t calls_ns;       /* all of its calls */
    uint64_t first_ended_ns; /* the first of its calls; 0: there was none */
    uint64_t last_began_ns;
    uint64_t last_ended_ns;
    uint64_t ended_ns;
};

/* `path` is the control device. `done` is called from the loop for each finished order. Returns 0 or -errno. */
int channels_open(const char *path, void (*done)(struct channels_order *order));

/*
 * Identifies the control device. Called before the first order for a device, because the driver may be loaded after the
 * arbiter's start. False: there is none, and no call can be made.
 */
bool channels_device(void);

struct channels_thread;

/* Starts a thread for one device; NULL: out of memory. The thread never ends, because devices do not disappear. */
struct channels_thread *channels_thread_start(void);

/* Hands an order over; it comes back by `done`. Orders of a thread are carried out in sequence. */
void channels_submit(struct channels_thread *thread, struct channels_order *order);

void channels_order_free(struct channels_order *order);

/*
 * Abandons an order that hangs in a file or an exec of the tenant's: it comes back by `done`, with ETIMEDOUT. Returns
 * when to call again (CLOCK_MONOTONIC, nanoseconds); UINT64_MAX: the thread is idle.
 */
uint64_t channels_check(struct channels_thread *thread, uint64_t now);

/* Does a thread still hang in an abandoned order of this tenant? */
bool channels_barred(uint64_t tenant);

/*
 * Reads the groups of a process on the device `uuid` from the table of its slot into `process`, and subtracts their
 * number from *budget. False: there are none, the table cannot be read, or it has more than *budget groups. The caller
 * frees `process->groups`.
 */
bool channels_read(int usage_fd, uint32_t slot, const uint8_t uuid[16], uint32_t *budget,
                   struct channels_process *process);

/* Returns the devices of `count` that the table of a slot lists, as bits. *groups: the number of its groups. */
uint32_t channels_devices(int usage_fd, uint32_t slot, const uint8_t *const uuids[], uint32_t count, uint32_t *groups);

/* Records in the table of a slot whether its channels are off a device. */
void channels_note_off(int usage_fd, uint32_t slot, uint32_t ordinal, bool off);

/* Reads the counters of a process's own load samples. False: its table cannot be read. */
struct channels_load {
    uint32_t samples;
    uint32_t unfinished;
    uint32_t groups; /* on all devices; the driver gives each group time slices */
};
bool channels_load(int usage_fd, uint32_t slot, struct channels_load *load);

/* The 16 bytes of a UUID in the form "GPU-..."; false for any other text. */
bool channels_uuid(const char *text, uint8_t uuid[16]);

#endif
