/*
 * For the build with counters only (tests/coverage.py): a process that SIGTERM ends writes its counts first, as a
 * process that exits does: those of the program, and of the libraries that it was started with. Each object has a
 * libgcov of its own. The counts are written once: libgcov adds nothing to its files after a dump.
 *
 * Programs have all of this file, and libraries vgpu_write_counts() only (COUNT_LIBRARY).
 */
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stddef.h>

void __gcov_dump(void);

#ifdef COUNT_LIBRARY
void vgpu_write_counts(void)
{
    __gcov_dump();
}
#else
enum { LIBRARIES_MAX = 16 };
static void (*writers[LIBRARIES_MAX])(void);
static unsigned count;

static void write_counts(int number)
{
    __gcov_dump();
    for (unsigned i = 0; i < count; i++)
        writers[i]();
    raise(number); /* SA_RESETHAND has restored the default action, which comes when the handler returns */
}

static int find_writer(struct dl_phdr_info *object, size_t size, void *unused)
{
    (void)size, (void)unused;
    void *library = object->dlpi_name[0] == '/' ? dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void (*writer)(void) = library != NULL ? (void (*)(void))dlsym(library, "vgpu_write_counts") : NULL;
    for (unsigned i = 0; writer != NULL && i < count; i++)
        if (writers[i] == writer) /* of a library that this one needs */
            writer = NULL;
    if (writer != NULL && count < LIBRARIES_MAX)
        writers[count++] = writer;
    return 0;
}

__attribute__((constructor)) static void count_at_sigterm(void)
{
    struct sigaction before, ours = {.sa_handler = write_counts, .sa_flags = SA_RESETHAND};
    dl_iterate_phdr(find_writer, NULL);
    if (sigaction(SIGTERM, NULL, &before) == 0 && before.sa_handler == SIG_DFL)
        sigaction(SIGTERM, &ours, NULL);
}
#endif
