#include "duty.h"

#include <stddef.h>

#include "lease_limits.h"

#define TURN_MIN_NS 200000u
#define DEBT_MAX_NS 1e9 /* maximum of the overrun that later slices pay back: it bounds the wait after a long kernel */

uint64_t vgpu_duty_turn(struct vgpu_duty *duty, double share, uint64_t now_ns, uint64_t *wait_ns)
{
    uint64_t period = now_ns / VGPU_DUTY_PERIOD_NS;
    uint64_t at = now_ns % VGPU_DUTY_PERIOD_NS;
    double whole = share * VGPU_DUTY_PERIOD_NS;
    if (period > duty->period) {
        duty->debt_ns -= whole * (double)(period - duty->period);
        duty->debt_ns = duty->debt_ns > 0 ? duty->debt_ns : 0;
    }
    duty->period = period;
    double length = whole - duty->debt_ns;
    *wait_ns = VGPU_DUTY_PERIOD_NS - at;
    if (share >= 1)
        return VGPU_DUTY_PERIOD_NS;
    if (length < TURN_MIN_NS && duty->debt_ns > 0)
        return 0;
    length = length < TURN_MIN_NS ? TURN_MIN_NS : length;
    return (double)at < length ? (uint64_t)(length - (double)at) : 0;
}

void vgpu_duty_overrun(struct vgpu_duty *duty, uint64_t overrun_ns)
{
    duty->debt_ns += (double)overrun_ns;
    duty->debt_ns = duty->debt_ns < DEBT_MAX_NS ? duty->debt_ns : DEBT_MAX_NS;
}

double vgpu_duty_share(const struct vgpu_limits *limits, double before)
{
    struct vgpu_limits now;
    double least = -1;
    if (limits == NULL || vgpu_limits_read(limits, &now) != 0)
        return before;
    for (unsigned d = 0; d < now.device_count; d++) {
        double share = now.devices[d].share / (double)VGPU_SHARE_ALL;
        if (now.devices[d].share_policy != VGPU_SHARE_NONE && (least < 0 || share < least))
            least = share;
    }
    return least;
}
