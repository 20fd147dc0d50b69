/*
 * channels.h: disables and enables the channels of a tenant's processes on a device by a call of the driver (rm.h),
 * without the tenant's help. A call blocks for some half a millisecond, so each device has a thread for such calls.
 *
 * The driver identifies a client by its open file, so the call is made on a copy of the process's file, made by
 * pidfd_getfd(2). The copy exists only during the call, because an open file keeps its client's memory allocated. The
 * list of channels is hostile input: no call is made on a file other than the control device, and the driver refuses
 * channels that do not belong to the file's client.
 *
 * The event loop's thread calls these functions. Between channels_submit and `done`, an order belongs to the device's
 * thread.
 *
 * Copying a file waits for the end of the process's exec, and closing it asks its file system, which may be the
 * tenant's own (FUSE). A thread that hangs in one of these is abandoned, and the device gets another thread. Until the
 * abandoned thread returns, channels_barred tells the caller to give no more orders for that tenant.
 */
#ifndef ARBITER_CHANNELS_H
#define ARBITER_CHANNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "lease.h"
#include "loop.h"

#define CHANNELS_PROCESS_CALLS_MAX 64u /* maximum of calls for one process in one order; more is an error */
/* time after which an order makes no further call: a call takes some 0.5 ms, and a lease has up to 256 processes */
#define CHANNELS_ORDER_NS_MAX 100000000u
#define CHANNELS_GROUPS_MAX 4096u /* maximum of channel groups that are read for one order */

/* The channel groups of one process on one device. */
struct channels_process {
    int pidfd; /* owned by this struct, and closed with the order */
    uint32_t count;
    uint32_t slot;
    uint32_t off; /* the words `off` and `doubtful` of the process's channel table */
    uint32_t doubtful;
    /* after the order: the groups whose calls succeeded; if the order enables, also groups whose file was missing */
    struct vgpu_channel_group *groups;
};

/* One order for one device's thread; freed by channels_order_free. */
struct channels_order {
    struct channels_order *next;
    bool off;
    /*
     * mapping of the `usage` file, owned by this struct. It is no open file, because close(2) would walk the file's
     * locks
     */
    unsigned char *usage_map;
    uint32_t process_count;
    struct channels_process *processes;
    void *owner;     /* not used by this module: free for the caller */
    uint64_t tenant; /* identifies the tenant: the same number for all leases of one tenant */
    uint32_t ordinal;
    /* the result of the order */
    uint32_t calls;
    /*
     * Calls that were not made because the process has no such file (EBADF): the process is exiting (before Linux 6.9;
     * a later kernel answers ESRCH, which is not counted); or it was in an exec, and its channels ended with the file;
     * or its table is false.
     */
    uint32_t missing;
    uint32_t failed; /* calls that failed, or that the driver refused */
    uint32_t status; /* the driver's status of the last refusal, or 0 */
    int error;       /* errno of the last refusal, or 0 */
    uint64_t began_ns;
    uint64_t first_ended_ns; /* time at which the first call of the order ended; 0 if the order made no call */
    uint64_t last_began_ns;
    uint64_t last_ended_ns;
    uint64_t ended_ns;
};

/*
 * Starts this module. `path` is the control device. `done` is called from the event loop for each finished order.
 * Returns 0 or -errno.
 */
int channels_open(const char *path, void (*done)(struct channels_order *order));

/*
 * Identifies the control device. Called before the first order for a device, because the driver may be loaded after the
 * arbiter's start. Returns false if there is no control device, so that no call can be made.
 */
bool channels_device(void);

struct channels_thread;

/*
 * Starts a thread for one device. Returns NULL if there is no memory or no thread for it. The device keeps a thread
 * until the arbiter ends.
 */
struct channels_thread *channels_thread_start(void);

/*
 * Passes an order to the device's thread. When the order is finished, `done` is called with it, and it is then freed.
 * The orders of a thread are carried out in sequence.
 */
void channels_submit(struct channels_thread *thread, struct channels_order *order);

void channels_order_free(struct channels_order *order);

/*
 * Abandons the thread's order if it hangs in a file or an exec of the tenant and another thread can be started; `done`
 * is then called with a copy of the order, whose error is ETIMEDOUT. Returns when to call this function again
 * (CLOCK_MONOTONIC, nanoseconds); UINT64_MAX if the thread is idle.
 */
uint64_t channels_check(struct channels_thread *thread, uint64_t now);

/* Returns whether a thread still hangs in an abandoned order of this tenant. */
bool channels_barred(uint64_t tenant);

/*
 * Reads the channel groups of a process on device `uuid` from the table of its slot into `process`. Subtracts from
 * *budget the number of groups that were read, on all devices and in all attempts. Returns false if the process has no
 * group on the device, the table cannot be read, it has more than *budget or VGPU_MAX_GROUPS groups, or memory is
 * short. The caller frees `process->groups`.
 */
bool channels_read(int usage_fd, uint32_t slot, const uint8_t uuid[16], uint32_t *budget,
                   struct channels_process *process);

/*
 * Returns which of the `count` devices are in the table of a slot, as bits; 0 if the table cannot be read. *groups is
 * the number of groups in the table.
 */
uint32_t channels_devices(int usage_fd, uint32_t slot, const uint8_t *const uuids[], uint32_t count, uint32_t *groups);

/*
 * Records in the table of a slot whether the channels of the slot's process on a device are disabled. Before each call
 * for a process, an order records that the channels may be disabled. If all calls have succeeded, it records their
 * state. So whenever the arbiter ends, the table tells the next arbiter which channels may be disabled.
 */
void channels_note(unsigned char *usage_map, uint32_t slot, uint32_t ordinal, bool off);

/* Counters of the load samples that a process takes of itself. */
struct channels_load {
    uint32_t sampled_ms;
    uint32_t waiting_ms; /* milliseconds of sampled_ms in which the process waited in a call */
    uint32_t busy_ms;    /* milliseconds of sampled_ms in which the process had unfinished work */
    uint32_t groups;     /* number of groups on all devices; the driver gives each group time slices */
};
/* Reads the counters of the process with this slot. Returns false if its table cannot be read. */
bool channels_load(int usage_fd, uint32_t slot, struct channels_load *load);

/* Converts a UUID of the form "GPU-..." to its 16 bytes. Returns false for any other text. */
bool channels_uuid(const char *text, uint8_t uuid[16]);

#endif
