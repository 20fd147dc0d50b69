#include "charge.h"

#include "device.h"
#include "functions.h"
#include "tenant.h"

uint64_t vgpu_round(uint64_t bytes)
{
    return bytes > UINT64_MAX - VGPU_ROUND_BYTES ? UINT64_MAX
                                                 : (bytes + VGPU_ROUND_BYTES - 1) & ~(uint64_t)(VGPU_ROUND_BYTES - 1);
}

/* With the arbiter away, memory of processes that died since is given back here, before a refusal. */
static bool reserve(int device, uint64_t bytes)
{
    struct vgpu_account *account = vgpu_tenant_account();
    unsigned d = (unsigned)device;
    if (vgpu_account_reserve(account, d, bytes, vgpu_tenant_limit(d)))
        return true;
    return vgpu_tenant_reclaim() && vgpu_account_reserve(account, d, bytes, vgpu_tenant_limit(d));
}

CUresult vgpu_charge_device(struct vgpu_charge *charge, CUdevice device, uint64_t bytes)
{
    bool limited;
    charge->active = false;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS || !limited)
        return result;
    charge->device = vgpu_device_index(device);
    if (charge->device == VGPU_NOT_IN_LEASE)
        return CUDA_ERROR_NOT_PERMITTED;
    charge->bytes = vgpu_round(bytes);
    if (!reserve(charge->device, charge->bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    charge->active = true;
    return CUDA_SUCCESS;
}

CUresult vgpu_charge_current(struct vgpu_charge *charge, uint64_t bytes)
{
    return vgpu_charge_stream(charge, NULL, 0, bytes);
}

CUresult vgpu_charge_stream(struct vgpu_charge *charge, CUstream stream, int per_thread, uint64_t bytes)
{
    CUdevice device;
    bool limited;
    charge->active = false;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS || !limited)
        return result;
    if (vgpu_device_of_stream(stream, per_thread, &device) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    return vgpu_charge_device(charge, device, bytes);
}

bool vgpu_charge_resize(struct vgpu_charge *charge, uint64_t bytes)
{
    uint64_t wanted = vgpu_round(bytes);
    if (!charge->active)
        return true;
    if (wanted > charge->bytes && !reserve(charge->device, wanted - charge->bytes))
        return false;
    if (wanted < charge->bytes)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)charge->device, charge->bytes - wanted);
    charge->bytes = wanted;
    return true;
}

void vgpu_charge_undo(struct vgpu_charge *charge, CUresult result)
{
    if (!charge->active)
        return;
    vgpu_account_release(vgpu_tenant_account(), (unsigned)charge->device, charge->bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        vgpu_account_card_full(vgpu_tenant_account(), (unsigned)charge->device);
    charge->active = false;
}

CUresult vgpu_charge_settle(struct vgpu_charge *charge, CUresult result, const struct vgpu_entry *entry, bool *keep)
{
    *keep = true;
    if (!charge->active)
        return result;
    if (result != CUDA_SUCCESS) {
        vgpu_charge_undo(charge, result);
        return result;
    }
    struct vgpu_entry stored = *entry;
    stored.bytes = charge->bytes;
    stored.device = charge->device;
    if (vgpu_table_put(&stored))
        return CUDA_SUCCESS;
    vgpu_charge_undo(charge, CUDA_SUCCESS);
    *keep = false;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void *vgpu_charge_context(void)
{
    CUcontext context = NULL;
    return CALL(cuCtxGetCurrent, &context) == CUDA_SUCCESS ? (void *)context : NULL;
}

void vgpu_charge_freed(const struct vgpu_entry *entry, bool taken, CUresult result)
{
    if (!taken)
        return;
    if (result == CUDA_SUCCESS)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)entry->device, entry->bytes);
    else
        vgpu_table_put(entry);
}

static bool ends_with_context(const struct vgpu_entry *entry, void *context)
{
    bool ends = entry->owner == context && (entry->kind == VGPU_KIND_POINTER || entry->kind == VGPU_KIND_ARRAY ||
                                            entry->kind == VGPU_KIND_MIPMAP);
    if (ends)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)entry->device, entry->bytes);
    return ends;
}

void vgpu_charge_end_context(CUcontext context)
{
    if (context != NULL)
        vgpu_table_purge(ends_with_context, context);
}

void vgpu_charge_reset(void)
{
    vgpu_table_reset();
}
