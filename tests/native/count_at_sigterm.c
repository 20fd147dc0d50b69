/*
 * For the build with counters only (tests/coverage.py): a process that SIGTERM ends writes its counts first, as a
 * process that exits does. The counts are written once: libgcov adds nothing to its files after a dump.
 */
#include <signal.h>
#include <stddef.h>

void __gcov_dump(void);

static void write_counts(int number)
{
    __gcov_dump();
    raise(number); /* SA_RESETHAND has restored the default action, which comes when the handler returns */
}

__attribute__((constructor)) static void count_at_sigterm(void)
{
    struct sigaction before, ours = {.sa_handler = write_counts, .sa_flags = SA_RESETHAND};
    if (sigaction(SIGTERM, NULL, &before) == 0 && before.sa_handler == SIG_DFL)
        sigaction(SIGTERM, &ours, NULL);
}
