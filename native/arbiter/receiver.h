/*
 * receiver.h: `vgpu-arbiter --receive BYTES`, a process that receives one message with a descriptor for vgpud
 * (vgpud/serve/runtime_wire.py). A close of the caller's descriptor may wait without end (keeper.h), so vgpud gets it
 * only if it is a pidfd.
 */
#ifndef ARBITER_RECEIVER_H
#define ARBITER_RECEIVER_H

#include <stddef.h>

/* descriptors of the receiver when it starts */
enum {
    RECEIVER_CALLER = 0, /* the socket to the caller, with a message */
    RECEIVER_VGPUD = 1,  /* a SOCK_SEQPACKET: gets the bytes, with the pidfd if there is one */
};

/*
 * Receives one message, and passes its first `most` bytes (256 at most) on to vgpud, with its descriptor if that is a
 * pidfd. Returns the exit status; the exit closes the descriptor.
 */
int receiver_run(size_t most);

#endif
