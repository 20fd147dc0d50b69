/*
 * deepbind.c: deepbind PLUGIN MIB loads a plugin with RTLD_DEEPBIND. The plugin holds MIB of device memory until
 * standard input ends. Its calls bind to libcuda directly and bypass every preloaded library.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    void *plugin = argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND) : NULL;
    int (*hold)(size_t) = NULL;
    if (plugin != NULL)
        *(void **)&hold = dlsym(plugin, "hold");
    if (hold == NULL) {
        fprintf(stderr, "%s\n", argc == 3 ? dlerror() : "usage: deepbind PLUGIN MIB");
        return 2;
    }
    printf("{\"result\": %d}\n", hold((size_t)atol(argv[2]) << 20));
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    return 0;
}
