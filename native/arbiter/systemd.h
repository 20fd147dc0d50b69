/*
 * systemd.h: tells systemd that the arbiter is ready, and that its event loop works. sd_notify(3) is one datagram, so
 * no library is needed. Without systemd (no NOTIFY_SOCKET) these functions send nothing.
 */
#ifndef ARBITER_SYSTEMD_H
#define ARBITER_SYSTEMD_H

/*
 * Sends WATCHDOG=1 from the event loop, twice in each interval of systemd's watchdog (WATCHDOG_USEC). Precondition: the
 * event loop is open. The same timer replaces a keeper (keeper.h) that was killed. Returns 0 or -errno.
 */
int systemd_watch_open(void);

/* Tells systemd that the arbiter is ready. */
void systemd_ready(void);

#endif
