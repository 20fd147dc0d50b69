/*
 * loop.h: one epoll loop, one thread. A source is embedded in the object that handles it.
 *
 * Slow sources are in an epoll instance of their own. Each turn of the loop serves one event of it, so a message on a
 * fast source waits for one look at most. Messages on slow sources (a registration) wait for their turn; epoll serves
 * ready sources round robin.
 *
 * The thread that calls loop_run calls every other function, too.
 */
#ifndef ARBITER_LOOP_H
#define ARBITER_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct source {
    int fd;
    bool slow; /* one of its events may cost a look at locks (aside.h); set before loop_add */
    void (*ready)(struct source *self, uint32_t events);
    void (*destroy)(struct source *self); /* frees the object; called after the batch of events ends */
    struct source *next_dead;
    int dead;
};

/* All functions return 0 or -errno. */
int loop_open(void);
int loop_add(struct source *source, uint32_t events);

/* Closes the descriptor at once; destroy runs when no event of this batch can still point at it. */
void loop_remove(struct source *source);

/* Makes a slow source a fast one. Precondition: it was added as slow. 0 or -errno; after an error the source gets no
 * events. */
int loop_hasten(struct source *source, uint32_t events);

/* loop_pause: the source gets no events until loop_resume. Earlier events may still come in this batch. */
void loop_pause(struct source *source);
void loop_resume(struct source *source, uint32_t events);

/* Called after each batch of events. */
void loop_after(void (*after)(void));

/* Runs the loop; returns -errno only if epoll itself fails. */
int loop_run(void);

/* accept4 for a full descriptor table: it drops the caller, so that the loop does not spin. */
int loop_accept(int listen_fd);

#endif
