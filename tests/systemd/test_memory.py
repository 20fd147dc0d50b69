"""vgpud's memory limits are above the maximum that callers can use, which is the sum of the bounds of its
sockets.
"""

from pathlib import Path

from vgpud.model.quantity import GIB, parse_bytes
from vgpud.serve.intake import Bounds
from vgpud.serve.relay import ConnectionLimits
from vgpud.serve.runtime import RuntimeLimits
from vgpud.serve.runtime_wire import MAX_BODY_BYTES
from vgpud.serve.server import MAX_REQUEST_BYTES

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "vgpud.service"
MIB = GIB // 1024
# measured by ./dev bench memory on the simulated node: 70 MiB without allocations, 87.6 with 1000, 117.2 with
# 3000
EMPTY_BYTES = 70 * MIB
ALLOCATION_BYTES = 18 * 1024
BASE_BYTES = EMPTY_BYTES + 10_000 * ALLOCATION_BYTES
# measured with 1000 idle connections: 17 KiB each, for grpc's transport and the relay's buffers
CONNECTION_BYTES = 64 * 1024
# bytes of a call whose message is not being read: lookahead_bytes in serve/server.py
WINDOW_BYTES = 16 * 1024
CONFIG_COPIES = 6  # copies of a config.json in memory: as bytes, parsed, edited and encoded
HOSTILE_USERS, HOSTILE_STRANGERS = 4, 8


def unit_bytes(key: str) -> int:
    (line,) = [line for line in UNIT.read_text().splitlines() if line.startswith(f"{key}=")]
    return parse_bytes(line.partition("=")[2].replace("G", "GiB").replace("M", "MiB"))


def one_user(connections: int, calls: int) -> int:
    bounds = Bounds()
    return (
        connections * CONNECTION_BYTES
        + calls * WINDOW_BYTES
        + bounds.messages_per_user * MAX_REQUEST_BYTES
        + bounds.unread_bytes_per_user
    )


def test_the_bounds_of_several_hostile_users_together_stay_below_the_units_memory_limits() -> None:
    limits, bounds = ConnectionLimits(), Bounds()
    tenant = one_user(limits.per_uid, bounds.calls_per_user)
    tenant += RuntimeLimits().per_user * MAX_BODY_BYTES * CONFIG_COPIES
    stranger = one_user(limits.per_stranger, bounds.calls_per_stranger)
    worst = BASE_BYTES + HOSTILE_USERS * tenant + HOSTILE_STRANGERS * stranger
    assert tenant < 300 * MIB
    assert stranger < 64 * MIB
    assert worst <= unit_bytes("MemoryMax")
    assert (
        BASE_BYTES + tenant + HOSTILE_STRANGERS * stranger
        <= unit_bytes("MemoryHigh")
        < unit_bytes("MemoryMax")
    )
