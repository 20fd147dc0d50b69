/*
 * bound.h: keeps `usage` files at their size. A tenant may write its own, and the file system that they are
 * on is everybody's: one that grows is cut back at once. Mapped stores, which is all that libvgpu does, are
 * no events; the arbiter's own writes are, and cost one look each.
 */
#ifndef ARBITER_BOUND_H
#define ARBITER_BOUND_H

/* Begins to watch; call once, after loop_open. 0 or -errno: then nothing is bounded. */
int bound_open(void);

/* Cuts the file down if it is too long, and watches it from now on. Returns a watch for bound_end, or -1. */
int bound_begin(int usage_fd);
void bound_end(int watch);

#endif
