#include "away.h"

#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "swap.h"

#define LOOK_NS 100000000 /* nobody may be there to say that the lease is back */

struct vgpu_away_words vgpu_away;

static const struct vgpu_limits *limits;
static struct vgpu_slot *slot;
static uint32_t epoch; /* futex: moves when the lease comes back */

uint32_t vgpu_away_state(void)
{
    return limits == NULL ? 0 : __atomic_load_n(&limits->state, __ATOMIC_ACQUIRE);
}

bool vgpu_away_now(void)
{
    return vgpu_away_state() == VGPU_LEASE_AWAY || vgpu_swap_held();
}

void vgpu_away_follow(void)
{
    bool away = vgpu_away_now();
    bool before = __atomic_exchange_n(&vgpu_away.away, away, __ATOMIC_SEQ_CST) != 0;
    if (before && !away) {
        __atomic_store_n(&slot->quiet, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&epoch, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &epoch, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
}

void vgpu_away_wait(void)
{
    struct timespec most = {.tv_nsec = LOOK_NS};
    if (!vgpu_away_now()) {
        if (__atomic_load_n(&vgpu_away.away, __ATOMIC_RELAXED))
            vgpu_away_follow();
        return;
    }
    __atomic_add_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        uint32_t seen = __atomic_load_n(&epoch, __ATOMIC_SEQ_CST);
        if (!vgpu_away_now())
            break;
        syscall(SYS_futex, &epoch, FUTEX_WAIT_PRIVATE, seen, &most, NULL, 0);
    }
    __atomic_sub_fetch(&slot->wants, 1, __ATOMIC_SEQ_CST);
    vgpu_away_follow();
}

void vgpu_away_start(const struct vgpu_limits *page, struct vgpu_slot *own)
{
    limits = page;
    slot = own;
    __atomic_store_n(&slot->wants, 0, __ATOMIC_SEQ_CST); /* of the slot's last owner */
    vgpu_swap_start(page, own);
    vgpu_away_answer(0, false, false);
    vgpu_away_follow();
}

void vgpu_away_answer(uint64_t launches, bool busy, bool quiet)
{
    uint64_t calls = launches + __atomic_load_n(&vgpu_away.calls, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->calls, calls, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->busy, busy, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->quiet, quiet, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&slot->looks, 1, __ATOMIC_SEQ_CST);
    vgpu_swap_follow(quiet);
}

void vgpu_away_reset(void)
{
    limits = NULL;
    slot = NULL;
    vgpu_swap_reset();
    memset(&vgpu_away, 0, sizeof(vgpu_away));
}
