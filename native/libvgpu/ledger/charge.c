#include "charge.h"

#include "invariant.h"
#include "suspended.h"
#include "device.h"
#include "functions.h"
#include "driver_overhead.h"
#include "primary.h"
#include "source.h"
#include "tenant.h"

/*
 * Claims bytes. Before a refusal, it looks for room: unused memory of this process's pools and graphs (as the driver
 * does on a full card), leftovers (driver_overhead.h), and the slots of dead processes (vgpu_tenant_reclaim).
 */
static bool reserve(int device, uint64_t bytes)
{
    struct vgpu_account *account = vgpu_tenant_account();
    unsigned d = (unsigned)device;
    vgpu_suspended_check(); /* waits here, because the free memory is not known while the lease is suspended */
    uint64_t limit = vgpu_tenant_limit(d);
    if (vgpu_account_reserve(account, d, bytes, limit))
        return true;
    if (bytes <= limit && vgpu_sources_give_back(device) && vgpu_account_reserve(account, d, bytes, limit))
        return true;
    if (bytes <= limit && vgpu_overhead_leftovers(device) && vgpu_account_reserve(account, d, bytes, limit))
        return true;
    vgpu_tenant_reclaim();
    /* even if this cleared no slot: the arbiter may have cleared one before this process looked */
    if (vgpu_account_reserve(account, d, bytes, limit))
        return true;
    vgpu_account_refused(account, d);
    return false;
}

CUresult vgpu_charge_index(struct vgpu_charge *charge, int index, uint64_t bytes)
{
    charge->active = false;
    charge->device = index;
    if (charge->device == VGPU_NOT_IN_LEASE)
        return CUDA_ERROR_NOT_PERMITTED;
    vgpu_overhead_if_stale(index);
    charge->bytes = vgpu_round(bytes, VGPU_PAGE_BYTES);
    if (!reserve(charge->device, charge->bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    charge->active = true;
    return CUDA_SUCCESS;
}

CUresult vgpu_charge_device(struct vgpu_charge *charge, CUdevice device, uint64_t bytes)
{
    bool limited;
    charge->active = false;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS || !limited)
        return result;
    return vgpu_charge_index(charge, vgpu_device_index(device), bytes);
}

CUresult vgpu_charge_current(struct vgpu_charge *charge, uint64_t bytes)
{
    CUdevice device;
    bool limited;
    charge->active = false;
    CUresult result = vgpu_tenant_enter(&limited);
    if (result != CUDA_SUCCESS || !limited)
        return result;
    vgpu_suspended_wait();
    if (vgpu_device_current(&device) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    return vgpu_charge_index(charge, vgpu_device_index(device), bytes);
}

bool vgpu_charge_resize(struct vgpu_charge *charge, uint64_t bytes)
{
    uint64_t wanted = vgpu_round(bytes, VGPU_PAGE_BYTES);
    if (!charge->active)
        return true;
    if (wanted > charge->bytes && !reserve(charge->device, wanted - charge->bytes))
        return false;
    if (wanted < charge->bytes)
        vgpu_account_settle(vgpu_tenant_account(), (unsigned)charge->device, charge->bytes - wanted, 0);
    charge->bytes = wanted;
    return true;
}

void vgpu_charge_undo(struct vgpu_charge *charge, CUresult result)
{
    if (!charge->active)
        return;
    vgpu_account_settle(vgpu_tenant_account(), (unsigned)charge->device, charge->bytes, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        vgpu_account_card_full(vgpu_tenant_account(), (unsigned)charge->device);
    charge->active = false;
}

/* Settles a claim: `kept` bytes of it stay charged. */
static void settle(struct vgpu_charge *charge, uint64_t kept)
{
    VGPU_ASSERT(charge->active && charge->device >= 0 && charge->device < (int)vgpu_tenant_devices());
    VGPU_ASSERT(charge->bytes % VGPU_PAGE_BYTES == 0);
    vgpu_account_settle(vgpu_tenant_account(), (unsigned)charge->device, charge->bytes, kept);
    vgpu_overhead_changed();
    charge->active = false;
}

/*
 * Removes the entry of a handle that belonged to a context which has ended, and gives back its charge. The driver may give
 * the handle to new memory before vgpu_charge_end_context, called after the end of the context, has removed the entry.
 */
static void forget_ended(enum vgpu_kind kind, uint64_t key)
{
    struct vgpu_entry old = {0};
    vgpu_charge_freed(&old, vgpu_charge_take(kind, key, &old), CUDA_SUCCESS);
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
    stored.device = (int8_t)charge->device;
    if (stored.kind == VGPU_KIND_ARRAY || stored.kind == VGPU_KIND_MIPMAP)
        forget_ended(stored.kind, stored.key);
    *keep = vgpu_table_put(&stored);
    if (!*keep)
        return CUDA_ERROR_OUT_OF_MEMORY;
    settle(charge, stored.bytes);
    return CUDA_SUCCESS;
}

CUresult vgpu_charge_pointer(struct vgpu_charge *charge, CUresult result, enum vgpu_kind kind, uint64_t pointer,
                             uint64_t bytes, bool *keep)
{
    struct vgpu_entry entry = {
        .kind = (uint8_t)kind, .key = pointer, .bytes = charge->bytes, .device = (int8_t)charge->device};
    *keep = true;
    if (!charge->active || result != CUDA_SUCCESS)
        return vgpu_charge_settle(charge, result, &entry, keep);
    uint64_t kept = charge->bytes;
    bool first = true;
    entry.owner = vgpu_charge_context();
    /* an old POINTER entry is removed even if a MANAGED one is stored: a free looks for POINTER first */
    forget_ended(VGPU_KIND_POINTER, pointer);
    if (kind == VGPU_KIND_MANAGED)
        forget_ended(VGPU_KIND_MANAGED, pointer);
    if (kind == VGPU_KIND_POINTER && bytes <= VGPU_SHARED_MAX) {
        entry.bytes = bytes; /* a small allocation is not charged: the page that contains it is */
        *keep = vgpu_table_put_in_page(&entry, &first);
        kept = first ? VGPU_PAGE_BYTES : 0;
    } else {
        *keep = vgpu_table_put(&entry);
    }
    if (!*keep)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == VGPU_KIND_MANAGED)
        vgpu_overhead_unseen(charge->device, (int64_t)kept);
    settle(charge, kept);
    return CUDA_SUCCESS;
}

void *vgpu_charge_context(void)
{
    CUcontext context = NULL;
    return CALL(cuCtxGetCurrent, &context) == CUDA_SUCCESS ? (void *)vgpu_primary_of(context) : NULL;
}

bool vgpu_charge_take(enum vgpu_kind kind, uint64_t key, struct vgpu_entry *entry)
{
    if (!vgpu_table_take(kind, key, entry))
        return false;
    vgpu_overhead_free_begins();
    return true;
}

/*
 * Returns the bytes that the entry releases: its own; for a small allocation those of its shared page if it was the
 * page's last entry, otherwise 0.
 */
static uint64_t bytes_of(const struct vgpu_entry *entry)
{
    struct vgpu_entry page;
    if (entry->kind != VGPU_KIND_POINTER || entry->bytes >= VGPU_PAGE_BYTES)
        return entry->bytes;
    return vgpu_table_leave_page(entry, &page) ? page.bytes : 0;
}

void vgpu_charge_freed(const struct vgpu_entry *entry, bool taken, CUresult result)
{
    if (!taken)
        return;
    if (result == CUDA_SUCCESS) {
        uint64_t bytes = bytes_of(entry);
        if (entry->kind == VGPU_KIND_MANAGED)
            vgpu_overhead_unseen(entry->device, -(int64_t)bytes);
        if (bytes > 0)
            vgpu_account_release(vgpu_tenant_account(), (unsigned)entry->device, bytes);
    } else {
        vgpu_table_put(entry);
    }
    vgpu_overhead_free_ends();
}

void vgpu_charge_freed_later(const struct vgpu_entry *entry, bool taken, CUresult result)
{
    if (taken && result == CUDA_SUCCESS) {
        uint64_t bytes = bytes_of(entry);
        if (bytes > 0)
            vgpu_overhead_instead(entry->device, bytes);
        vgpu_overhead_free_ends();
    } else {
        vgpu_charge_freed(entry, taken, result);
    }
}

/*
 * Does the entry's memory end with the context? If so, its charge is removed here. A small allocation has no charge of
 * its own, because its shared page has a separate entry.
 */
static bool ends_with_context(const struct vgpu_entry *entry, void *context)
{
    if (entry->owner != context || entry->kind < VGPU_KIND_POINTER || entry->kind > VGPU_KIND_MIPMAP)
        return false;
    if (entry->kind == VGPU_KIND_MANAGED)
        vgpu_overhead_unseen(entry->device, -(int64_t)entry->bytes);
    if (entry->kind != VGPU_KIND_POINTER || entry->bytes >= VGPU_PAGE_BYTES)
        vgpu_account_release(vgpu_tenant_account(), (unsigned)entry->device, entry->bytes);
    return true;
}

void vgpu_charge_end_context(CUcontext context)
{
    if (context != NULL)
        vgpu_table_purge(ends_with_context, context);
}
