"""What swapped tenants may leave on a device as long as nobody needs the room: pure.

It is no part of what they are charged with: room is given away as if it were free, and whoever gets it has
them let go of so much first. So for each device

    limits of those who are there + what of the others cannot move + what they keep <= what the device has
"""

from collections.abc import Mapping

SHARE_ALL = 10_000  # hundredths of a percent
# contexts and page-locked buffers grow a little behind the figures of a moment ago
MARGIN_BYTES = 256 << 20


def keep_share(capacity: int, charged: int, movable: int) -> int:
    """How much of its `movable` bytes a tenant that goes may keep, in hundredths of a percent: what is left
    of `capacity` beside all that is charged or kept there without it, `charged`."""
    spare = max(capacity - charged - MARGIN_BYTES, 0)
    return min(spare * SHARE_ALL // movable, SHARE_ALL) if movable > 0 else 0


def shrunk(capacity: int, charged: int, kept: Mapping[str, int]) -> dict[str, int]:
    """Bytes that those may keep who have to let go of some, so that all fits; `kept` is what each one has.
    The one that has most goes first, so that few have to move."""
    over = charged + sum(kept.values()) + MARGIN_BYTES - capacity
    less: dict[str, int] = {}
    for name, held in sorted(kept.items(), key=lambda item: (-item[1], item[0])):
        if over <= 0:
            break
        if held > 0:
            less[name] = max(held - over, 0)
            over -= held - less[name]
    return less
