#include "source.h"

#include <stddef.h>

/* The linker's symbols for the beginning and the end of section vgpu_sources. */
extern const struct vgpu_source *const __start_vgpu_sources[] __attribute__((visibility("hidden")));
extern const struct vgpu_source *const __stop_vgpu_sources[] __attribute__((visibility("hidden")));

bool vgpu_sources_settle(int device)
{
    bool same = true;
    for (const struct vgpu_source *const *source = __start_vgpu_sources; source < __stop_vgpu_sources; source++)
        same = (*source)->settle(device) && same;
    return same;
}

bool vgpu_sources_give_back(int device)
{
    bool came = false;
    for (const struct vgpu_source *const *source = __start_vgpu_sources; source < __stop_vgpu_sources; source++)
        came = ((*source)->give_back != NULL && (*source)->give_back(device)) || came;
    return came;
}

void vgpu_sources_add(uint64_t by_kind[VGPU_STAY_KINDS])
{
    for (const struct vgpu_source *const *source = __start_vgpu_sources; source < __stop_vgpu_sources; source++)
        by_kind[(*source)->kind] += (*source)->charged();
}
