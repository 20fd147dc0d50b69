"""How much memory swapped-out tenants may keep on a device until another tenant needs it. Pure.

Kept memory does not count as allocated: the planner gives the room to other tenants, and an eviction frees
the kept memory first. For each device:

    limits of the tenants on it + memory of the others that cannot move + kept memory <= capacity
"""

from collections.abc import Mapping

SHARE_ALL = 10_000  # 100 % of a tenant's movable memory, in hundredths of a percent
# reserve for contexts and page-locked buffers that grew since the figures were read
MARGIN_BYTES = 256 << 20


def keep_share(capacity: int, charged: int, movable: int) -> int:
    """The part of a tenant's `movable` bytes that it may keep on the device, in hundredths of a percent. The
    tenant may keep what `capacity` leaves beside `charged`, the bytes that are charged or kept on the device
    without this tenant.
    """
    spare = max(capacity - charged - MARGIN_BYTES, 0)
    return min(spare * SHARE_ALL // movable, SHARE_ALL) if movable > 0 else 0


def shrunk(capacity: int, charged: int, kept: Mapping[str, int]) -> dict[str, int]:
    """The bytes that each tenant may still keep, for the tenants that must give up some. `kept` has what each
    keeps now. The tenant that keeps most gives up first, so that few tenants have to copy memory.
    """
    over = charged + sum(kept.values()) + MARGIN_BYTES - capacity
    less: dict[str, int] = {}
    for name, held in sorted(kept.items(), key=lambda item: (-item[1], item[0])):
        if over <= 0:
            break
        if held > 0:
            less[name] = max(held - over, 0)
            over -= held - less[name]
    return less
