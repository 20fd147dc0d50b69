/* A libcuda whose cuInit runs the command of $DURING. */
#include <stdlib.h>

int cuInit(unsigned flags);
int cuInit(unsigned flags)
{
    (void)flags;
    return system(getenv("DURING"));
}
