"""How much memory swapped-out tenants may keep on a device until another tenant needs it: pure.

Kept memory is not charged to them: room is allocated as if it were free, and an eviction frees the kept
memory first. For each device:

    limits of the tenants on it + memory of the others that cannot move + kept memory <= capacity
"""

from collections.abc import Mapping

SHARE_ALL = 10_000  # the whole, in hundredths of a percent
# contexts and page-locked buffers may have grown since the figures were read
MARGIN_BYTES = 256 << 20


def keep_share(capacity: int, charged: int, movable: int) -> int:
    """The part of its `movable` bytes that a tenant may keep, in hundredths of a percent: what `capacity`
    leaves beside `charged`, the bytes charged or kept on the device without this tenant."""
    spare = max(capacity - charged - MARGIN_BYTES, 0)
    return min(spare * SHARE_ALL // movable, SHARE_ALL) if movable > 0 else 0


def shrunk(capacity: int, charged: int, kept: Mapping[str, int]) -> dict[str, int]:
    """The bytes that tenants may still keep, for those that must give up some; `kept` is what each has now.
    The tenant that keeps most gives up first, so that few tenants have to copy memory."""
    over = charged + sum(kept.values()) + MARGIN_BYTES - capacity
    less: dict[str, int] = {}
    for name, held in sorted(kept.items(), key=lambda item: (-item[1], item[0])):
        if over <= 0:
            break
        if held > 0:
            less[name] = max(held - over, 0)
            over -= held - less[name]
    return less
