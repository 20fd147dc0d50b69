#include "usage_io.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "lease.h"

static int own_memory =
    /*
     * descriptor of /proc/self/mem (proc(5)): a write to a page that the file lacks fails, where a store raises SIGBUS
     */
    -1;

int usage_io_open(void)
{
    own_memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    return own_memory < 0 ? -errno : 0;
}

unsigned char *usage_io_map(int usage_fd)
{
    void *map = mmap(NULL, VGPU_USAGE_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, usage_fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

void usage_io_unmap(unsigned char *map)
{
    if (map != NULL)
        munmap(map, VGPU_USAGE_FILE_BYTES);
}

bool usage_io_load(const unsigned char *map, off_t at, void *data, size_t size)
{
    return map != NULL && pread(own_memory, data, size, (off_t)(uintptr_t)(map + at)) == (ssize_t)size;
}

void usage_io_store(unsigned char *map, off_t at, const void *data, size_t size)
{
    if (map != NULL)
        (void)!pwrite(own_memory, data, size, (off_t)(uintptr_t)(map + at));
}

bool usage_io_in_memory(const unsigned char *map, off_t at)
{
    const off_t page_bytes = sysconf(_SC_PAGESIZE);
    unsigned char in_memory = 1;
    if (map != NULL)
        mincore((void *)(uintptr_t)(map + at - at % page_bytes), 1, &in_memory);
    return (in_memory & 1) != 0;
}

void usage_io_bring_in(int usage_fd, off_t at)
{
    char byte;
    if (pread(usage_fd, &byte, 1, at) == 1)
        (void)!pwrite(usage_fd, &byte, 1, at);
}

static off_t slot_offset(uint32_t slot)
{
    return (off_t)(offsetof(struct vgpu_usage, slots) + slot * sizeof(struct vgpu_slot));
}

static struct flock slot_range(uint32_t slot, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = slot_offset(slot), .l_len = 1};
}

uint32_t usage_io_owner(int usage_fd, uint32_t slot)
{
    uint32_t owner = 0;
    if (pread(usage_fd, &owner, sizeof(owner), slot_offset(slot)) != (ssize_t)sizeof(owner))
        return 0;
    return owner;
}

uint32_t usage_io_slots(int usage_fd, uint32_t first, struct vgpu_slot *slots, uint32_t count)
{
    ssize_t size = pread(usage_fd, slots, count * sizeof(*slots), slot_offset(first));
    return size > 0 ? (uint32_t)((size_t)size / sizeof(*slots)) : 0;
}

pid_t usage_io_holder(int usage_fd, uint32_t slot)
{
    struct flock range = slot_range(slot, F_WRLCK);
    if (fcntl(usage_fd, F_GETLK, &range) != 0 || range.l_type == F_UNLCK)
        return 0;
    return range.l_pid > 0 ? range.l_pid : -1;
}

static uint64_t plus(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/*
 * Adds the counters of an ended process to the retired counters of the lease, so that the lease's sums do not decrease;
 * of the peaks the larger one stays.
 */
static void retire(int usage_fd, const struct vgpu_slot *slot)
{
    struct vgpu_slot_device total[VGPU_MAX_DEVICES] = {0};
    off_t at = (off_t)offsetof(struct vgpu_usage, retired);
    if (pread(usage_fd, total, sizeof(total), at) != (ssize_t)sizeof(total))
        return;
    for (unsigned d = 0; d < VGPU_MAX_DEVICES; d++) {
        const struct vgpu_slot_device *gone = &slot->devices[d];
        total[d].refusals_limit = plus(total[d].refusals_limit, gone->refusals_limit);
        total[d].refusals_card = plus(total[d].refusals_card, gone->refusals_card);
        total[d].launches = plus(total[d].launches, gone->launches);
        total[d].throttled_ns = plus(total[d].throttled_ns, gone->throttled_ns);
        if (gone->peak_bytes > total[d].peak_bytes)
            total[d].peak_bytes = gone->peak_bytes;
    }
    (void)!pwrite(usage_fd, total, sizeof(total), at);
}

/* Clears a slot. The owner word is cleared last, because a process may take the slot as soon as the word is 0. */
static void clear(int usage_fd, uint32_t index)
{
    static const struct vgpu_slot zero;
    struct vgpu_slot slot;
    size_t head = sizeof(zero.owner);
    if (pread(usage_fd, &slot, sizeof(slot), slot_offset(index)) != (ssize_t)sizeof(slot))
        return; /* the tenant truncated the file, so there is nothing to clear */
    retire(usage_fd, &slot);
    (void)!pwrite(usage_fd, (const char *)&zero + head, sizeof(zero) - head, slot_offset(index) + (off_t)head);
    (void)!pwrite(usage_fd, &zero, head, slot_offset(index));
}

bool usage_io_clear_if_dead(int usage_fd, uint32_t slot)
{
    /*
     * An open-file-description lock conflicts with the process locks of tenants. Unlike those it is not lost when the
     * arbiter closes another descriptor of the same file.
     */
    struct flock range = slot_range(slot, F_WRLCK);
    if (fcntl(usage_fd, F_OFD_SETLK, &range) != 0)
        return false;
    if (usage_io_owner(usage_fd, slot) != 0)
        clear(usage_fd, slot);
    range.l_type = F_UNLCK;
    fcntl(usage_fd, F_OFD_SETLK, &range);
    return true;
}
