/* static.c: a statically linked program, into which libvgpu cannot be preloaded. Waits until its input ends. */
#include <stdio.h>

int main(void)
{
    puts("static");
    fflush(stdout);
    while (getchar() != EOF)
        continue;
    return 0;
}
