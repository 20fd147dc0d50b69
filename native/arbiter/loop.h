/*
 * loop.h: one epoll loop on one thread. A source is embedded in the object that handles it.
 *
 * Slow sources have a separate epoll instance. A turn of the loop serves the events of fast sources, then at most one
 * event of a slow source. So a message on a fast source waits for at most one look (looks.h), which began before it
 * came. Messages on slow sources (a registration) wait for their turn; epoll serves ready sources round robin.
 *
 * All functions must be called on the thread that calls loop_run.
 */
#ifndef ARBITER_LOOP_H
#define ARBITER_LOOP_H

#include <stdbool.h>
#include <stdint.h>

struct source {
    int fd;
    bool slow; /* an event of this source may cost a look at locks (aside.h); set before loop_add */
    void (*ready)(struct source *self, uint32_t events);
    void (*destroy)(struct source *self); /* frees the object; called after the end of the present batch of events */
    struct source *next_dead;
    int dead;
};

/* loop_open and loop_add return 0 or -errno. */
int loop_open(void);
int loop_add(struct source *source, uint32_t events);

/*
 * Removes a source and closes its descriptor at once. destroy runs when no event of this batch can still point to the
 * source.
 */
void loop_remove(struct source *source);

/*
 * Makes a slow source a fast one. Precondition: it was added as slow. Returns 0 or -errno; after an error the source
 * gets no events.
 */
int loop_hasten(struct source *source, uint32_t events);

/* loop_pause: the source gets no events until loop_resume. Events of the present batch may still be delivered. */
void loop_pause(struct source *source);
void loop_resume(struct source *source, uint32_t events);

/* Sets a function that is called after each batch of events: those of fast sources, and that of a slow source. */
void loop_after(void (*after)(void));

/* Runs the loop. Returns -errno only if epoll itself fails. */
int loop_run(void);

/*
 * Accepts a connection as accept4. If the descriptor table is full, closes the connection at once, so that the loop
 * does not spin. Returns the descriptor or -errno.
 */
int loop_accept(int listen_fd);

#endif
