"""The progress that vgpuctl shows in a terminal while a tenant is suspended, resumed or moved."""

import re
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.ctl import canned
from tests.ctl.conftest import Ctl
from tests.ctl.daemon import Daemon
from tests.ctl.test_top import Live
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.progress import Operation, Seen, progress_line

SUSPEND = ("suspend", "a1b2c3d4")


@pytest.fixture
def ready(daemon: Daemon) -> Iterator[threading.Event]:
    """The daemon finishes a suspension when this event is set."""
    event = threading.Event()

    def suspend(request: object) -> pb.Allocation:
        assert event.wait(300)
        return canned.preload()

    daemon.replies["Suspend"] = suspend
    daemon.replies["DrainDevice"] = lambda request: suspend(request) and pb.DrainDeviceReply(idle=True)
    daemon.replies["Allocate"] = suspend
    yield event
    event.set()


def test_a_terminal_shows_the_progress_of_a_suspension(daemon: Daemon, ready: threading.Event) -> None:
    live = Live(daemon, verb=SUSPEND)
    try:
        live.until("suspending a1b2c3d4; Ctrl-C leaves it to vgpud")
        live.until("s, 1GiB of 1GiB on the device\x1b")
        since = len(live.text)
        ready.set()
        live.until("LABEL", since)
        assert live.process.wait(300) == 0
    finally:
        live.close()


def test_the_progress_line_does_not_wrap_in_a_narrow_terminal(daemon: Daemon, ready: threading.Event) -> None:
    live = Live(daemon, verb=("drain", "0", "--move"), columns=20)
    try:
        live.until("emptying device 0; Ctrl-C leaves it to vgpud")
        live.until("s, 1GiB of 1GiB")
        ready.set()
        assert live.process.wait(300) == 0
    finally:
        live.close()
    lines = re.findall(r"\r(\d+s, [^\x1b\r]*)", live.text)
    assert lines and max(map(len, lines)) < 20


def test_a_defragmentation_shows_what_is_still_to_be_moved(daemon: Daemon, ready: threading.Event) -> None:
    """Two moves of 3 GiB together are planned. 1 GiB has been moved, because the tenant of the prepared reply
    is on device A.
    """
    moves = [
        pb.TenantMove(allocation_id="a1b2c3d4", source=canned.B, target=canned.A, memory_bytes=canned.GIB),
        pb.TenantMove(allocation_id="c3d4", source=canned.A, target=canned.B, memory_bytes=2 * canned.GIB),
    ]
    planned = pb.DefragReply(device_uuid=canned.A, moves=moves)
    daemon.replies["PlanDefrag"] = planned
    daemon.replies["Defrag"] = lambda request: ready.wait(300) and planned
    live = Live(daemon, verb=("defrag",))
    try:
        live.until("moving tenants to make room; Ctrl-C leaves it to vgpud")
        live.until("s, 2GiB of 3GiB to be moved")
        ready.set()
        assert live.process.wait(300) == 0
    finally:
        live.close()


def test_an_interrupt_prints_that_vgpud_continues_the_suspension(
    daemon: Daemon, ready: threading.Event
) -> None:
    live = Live(daemon, verb=SUSPEND)
    try:
        live.until("suspending a1b2c3d4; ")
        live.process.send_signal(signal.SIGINT)
        live.until("vgpud goes on suspending a1b2c3d4")
        ready.set()
        assert live.process.wait(300) == 130
    finally:
        live.close()


def test_alloc_says_that_it_waits_for_the_arbiter(daemon: Daemon, ready: threading.Event) -> None:
    daemon.replies["GetNode"] = pb.NodeReply(arbiter_error="vgpu-arbiter does not answer: wait")
    live = Live(daemon, verb=("alloc", "--memory", "1GiB"))
    try:
        live.until("vgpu-arbiter does not answer: wait")
        ready.set()
        assert live.process.wait(300) == 0
    finally:
        live.close()


def test_no_progress_is_written_to_a_pipe(main: Ctl, ready: threading.Event) -> None:
    ready.set()
    assert "suspending" not in main("suspend", "a1b2c3d4").stderr


@pytest.mark.parametrize(
    ("leaves", "before", "on_device", "whole", "shown"),
    [
        (True, 0, 0, 0, ""),
        (True, 4, 4, 4, ", 4GiB of 4GiB on the device"),
        (True, 2, 1, 4, ", 1GiB of 4GiB on the device, about 20s left"),
        (True, 1, 1, 4, ", 1GiB of 4GiB on the device"),
        (True, 1, 0, 4, ", 0 of 4GiB on the device"),
        (False, 0, 1, 4, ", 1GiB of 4GiB on the device, about 3m left"),
        (None, 0, 1, 4, ", 1GiB of 4GiB on the device"),
    ],
)
def test_the_progress_line_has_the_memory_and_the_time_left_while_memory_moves(
    leaves: bool | None, before: int, on_device: int, whole: int, shown: str
) -> None:
    seen = Seen(on_device * canned.GIB, whole * canned.GIB)
    operation = Operation("moving a1", lambda client: seen, leaves)
    line = progress_line(operation, seen, before * canned.GIB, 60.0)
    assert line == f"1m{shown}"
