#include "physical.h"

#include "allocation.h"
#include "charge.h"
#include "swap.h"

/* first name: no address of a process and no handle of the driver has such a value */
#define NAMES_FROM 0x7667707500000000u

struct vgpu_allocation *vgpu_physical_make(uint64_t bytes, const CUmemAllocationProp *prop)
{
    if (!vgpu_swap_wanted() || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return NULL;
    struct vgpu_allocation *memory = vgpu_allocation_make(bytes, bytes);
    if (memory == NULL)
        return NULL;
    memory->prop = *prop;
    /*
     * excludes RDMA, as for plain memory: a network card would go on writing to physical pages that belong to other
     * tenants after an eviction
     */
    memory->prop.allocFlags.gpuDirectRDMACapable = 0;
    memory->of_program = true;
    vgpu_swap_count();
    return memory;
}

CUmemGenericAllocationHandle vgpu_physical_name(void)
{
    static uint64_t last = NAMES_FROM;
    return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

void vgpu_physical_movable(struct vgpu_allocation *memory, CUdeviceptr base)
{
    CUcontext context = vgpu_charge_context();
    vgpu_physical_fixed(memory);
    if (context == NULL)
        return;
    memory->base = base;
    memory->context = context;
    vgpu_swap_holds((int64_t)memory->bytes);
    vgpu_allocation_link(memory);
}

void vgpu_physical_fixed(struct vgpu_allocation *memory)
{
    if (vgpu_allocation_unlink(memory))
        vgpu_swap_holds(-(int64_t)memory->bytes);
}

/*
 * Does the memory end with the context? If so, its size is subtracted from the evictable bytes here, because another
 * thread may free the record as soon as it is out of the list.
 */
static bool ends_with(const struct vgpu_allocation *memory, void *context)
{
    bool ends = memory->of_program && memory->context == context;
    if (ends)
        vgpu_swap_holds(-(int64_t)memory->bytes);
    return ends;
}

void vgpu_physical_end_context(CUcontext context)
{
    while (vgpu_allocation_find(ends_with, context, true) != NULL)
        continue;
}
