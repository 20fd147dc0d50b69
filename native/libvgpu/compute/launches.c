#include "launches.h"

#include <string.h>

#include "in_child.h"

struct vgpu_launch_words vgpu_launches;

static void reset(void)
{
    memset(&vgpu_launches, 0, sizeof(vgpu_launches));
}
VGPU_IN_CHILD(reset);
