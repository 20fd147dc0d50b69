/*
 * fuzz_pages.c: how libvgpu reads a lease: `limits`, and `usage`, which every process of the tenant can write. The
 * input is the content of both pages, followed by calls of one process on them.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "account.h"
#include "fuzz.h"
#include "lease_limits.h"
#include "slot.h"

const char *const fuzz_words[] = {"VPUL\1\0\0\0", "GPU-00000000-0000-0000-0000-000000000001", "MIG-", NULL};

static struct vgpu_limits limits;
static struct vgpu_usage *usage;
static int usage_fd = -1;

static const struct vgpu_limits good = {
    .magic = VGPU_LEASE_MAGIC,
    .version = VGPU_LEASE_VERSION,
    .allocation = "a1",
    .state = VGPU_LEASE_OPEN,
    .device_count = 1,
    .devices = {{.uuid = "GPU-00000000-0000-0000-0000-000000000001",
                 .memory_bytes = 1 << 30,
                 .share = 2500,
                 .share_policy = VGPU_SHARE_HARD}},
};

static void begin(void)
{
    usage_fd = memfd_create("usage", MFD_CLOEXEC);
    if (usage_fd < 0 || ftruncate(usage_fd, sizeof(*usage)) != 0)
        abort();
    usage = mmap(NULL, sizeof(*usage), PROT_READ | PROT_WRITE, MAP_SHARED, usage_fd, 0);
    if (usage == MAP_FAILED)
        abort();
}

/*
 * Applies the changes in `data`: each has a place (4 bytes), a length (1 byte) and bytes. The place's top bit selects
 * `limits` or `usage`.
 */
static size_t scribble(const uint8_t *data, size_t size)
{
    size_t at = 0;
    while (size - at >= 5 && data[at + 4] != 0xff) {
        uint32_t place;
        memcpy(&place, data + at, sizeof(place));
        size_t length = data[at + 4];
        at += 5;
        if (length > size - at)
            length = size - at;
        size_t room = place >> 31 ? sizeof(limits) : sizeof(*usage);
        size_t offset = (place & 0x7fffffff) % room;
        char *page = place >> 31 ? (char *)&limits : (char *)usage;
        memcpy(page + offset, data + at, length > room - offset ? room - offset : length);
        at += length;
    }
    return at;
}

static void check_limits(void)
{
    struct vgpu_limits copy;
    unsigned char id[16];
    if (vgpu_limits_read(&limits, &copy) != 0)
        return;
    if (copy.device_count == 0 || copy.device_count > VGPU_MAX_DEVICES)
        abort();
    for (uint32_t d = 0; d < copy.device_count; d++) {
        if (memchr(copy.devices[d].uuid, '\0', VGPU_UUID_BYTES) == NULL || copy.devices[d].share > VGPU_SHARE_ALL)
            abort();
        (void)vgpu_uuid_parse(copy.devices[d].uuid, id);
    }
}

static void check_account(const uint8_t *data, size_t size, int slot)
{
    struct vgpu_account account = {.usage = usage, .slot = (uint32_t)slot, .slow = PTHREAD_MUTEX_INITIALIZER};
    for (size_t i = 0; i + 9 < size && i < 90; i += 10) {
        uint64_t bytes;
        unsigned device = data[i] % VGPU_MAX_DEVICES;
        memcpy(&bytes, data + i + 2, sizeof(bytes));
        switch (data[i + 1] % 7) {
        case 0:
            if (vgpu_account_reserve(&account, device, bytes, 1 << 30)) {
                if (bytes > 1 << 30)
                    abort(); /* a request above the limit is refused, whatever the page contains */
                vgpu_account_settle(&account, device, bytes, bytes / 2);
            }
            break;
        case 1:
            vgpu_account_add(&account, device, bytes);
            break;
        case 2:
            vgpu_account_release(&account, device, bytes);
            break;
        case 3:
            vgpu_account_to_context(&account, device, bytes);
            break;
        case 4:
            vgpu_account_set_context(&account, device, bytes);
            break;
        case 5:
            vgpu_account_refused(&account, device);
            break;
        default:
            if (vgpu_account_sum(usage, device) < vgpu_account_settled(usage, device))
                abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (usage == NULL)
        begin();
    memset(usage, 0, sizeof(*usage));
    limits = good;
    size_t used = scribble(data, size);
    check_limits();
    int slot = vgpu_slot_claim(usage_fd, usage);
    if (slot >= (int)VGPU_MAX_SLOTS)
        abort();
    if (slot >= 0)
        check_account(data + used, size - used, slot);
    (void)vgpu_slot_clear_dead(usage_fd, usage, slot < 0 ? VGPU_NO_SLOT : (uint32_t)slot, true);
    return 0;
}
