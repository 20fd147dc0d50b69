/* hooks_doc.c: prints hooks.def as a Markdown table, for the documentation and for the test that
 * compares it with the driver's symbols. */
#include <stdio.h>

int main(void)
{
    puts("| symbol | family | treatment |\n|---|---|---|");
#define HOOK(symbol, library, family, since, what) puts("| `" #symbol "` | " #family " | wrapped: " what " |");
#define USED(symbol, library) puts("| `" #symbol "` | used | not wrapped: libvgpu asks it |");
#define OPEN(symbol, family, reason) puts("| `" #symbol "` | " #family " | not wrapped: " reason " |");
#include "hooks.def"
#undef HOOK
#undef USED
#undef OPEN
    return 0;
}
