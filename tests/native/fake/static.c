/* static.c: a program with no dynamic linker, so with no libvgpu. Waits for the end of its input. */
#include <stdio.h>

int main(void)
{
    puts("static");
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    return 0;
}
