/*
 * keeper.h: `vgpu-arbiter --keep`, a process that holds a copy of each socket on which callers may pass descriptors
 * (SCM_RIGHTS), for vgpud (vgpud/untrusted.py) and for the arbiter (untrusted.c).
 *
 * The kernel closes descriptors that wait in a socket when the last copy of that socket is closed, also by an exit.
 * That close can wait for as long as the caller likes: for a socket that lingers, or for a file of the caller's own
 * file system (FUSE), where no signal ends the wait. So the holder's own copy must not be the last one. The keeper
 * holds no lock and no file that another process needs, and closes sockets with waiting descriptors on extra threads,
 * one for each user.
 */
#ifndef ARBITER_KEEPER_H
#define ARBITER_KEEPER_H

#include <stdint.h>

/*
 * A message to the keeper. With a descriptor: hold it as `number`, for `user`. Without: drop socket `number`, which the
 * holder has shut down and closed.
 */
struct keeper_message {
    uint64_t number;
    uint64_t user;
};

/* descriptors of the keeper when it starts */
enum {
    KEEPER_LINE = 0,   /* a SOCK_SEQPACKET with the messages */
    KEEPER_HOLDER = 1, /* a pidfd of the holder */
};

/*
 * Serves until the holder has ended, or has closed the line because another keeper now holds its sockets. The process
 * ends when all sockets are closed. Returns an exit status only if poll(2) fails.
 */
int keeper_run(void);

#endif
