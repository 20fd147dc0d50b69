"""What a terminal shows while a tenant is suspended, resumed or moved."""

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
        assert event.wait(60)
        return canned.preload()

    daemon.replies["Suspend"] = suspend
    daemon.replies["DrainDevice"] = lambda request: suspend(request) and pb.DrainDeviceReply(idle=True)
    yield event
    event.set()


def test_a_terminal_shows_the_progress_of_a_suspension(daemon: Daemon, ready: threading.Event) -> None:
    live = Live(daemon, verb=SUSPEND)
    try:
        live.until("suspending a1b2c3d4: ")
        live.until("1GiB of 1GiB on the device; Ctrl-C leaves it to vgpud")
        since = len(live.text)
        ready.set()
        live.until("LABEL", since)
        assert live.process.wait(30) == 0
    finally:
        live.close()


def test_the_progress_line_does_not_wrap_in_a_narrow_terminal(daemon: Daemon, ready: threading.Event) -> None:
    live = Live(daemon, verb=("drain", "0", "--move"), columns=40)
    try:
        live.until("\remptying device 0: 2s, 1GiB of 1GiB")
        ready.set()
        assert live.process.wait(30) == 0
    finally:
        live.close()
    lines = re.findall(r"\r(emptying [^\x1b\r]*)", live.text)
    assert lines and max(map(len, lines)) < 40


def test_an_interrupt_prints_that_vgpud_continues_the_suspension(
    daemon: Daemon, ready: threading.Event
) -> None:
    live = Live(daemon, verb=SUSPEND)
    try:
        live.until("suspending a1b2c3d4: ")
        live.process.send_signal(signal.SIGINT)
        live.until("vgpud goes on suspending a1b2c3d4")
        ready.set()
        assert live.process.wait(30) == 130
    finally:
        live.close()


def test_no_progress_is_written_to_a_pipe(main: Ctl, ready: threading.Event) -> None:
    ready.set()
    assert "suspending" not in main("suspend", "a1b2c3d4").stderr


@pytest.mark.parametrize(
    ("leaves", "on_device", "shown"),
    [
        (True, 0, ""),
        (True, 4, ", 4GiB of 4GiB on the device"),
        (True, 1, ", 1GiB of 4GiB on the device, some 20s left"),
        (False, 1, ", 1GiB of 4GiB on the device, some 3m left"),
        (None, 1, ", 1GiB of 4GiB on the device"),
    ],
)
def test_the_progress_line_has_the_memory_and_the_time_left(
    leaves: bool | None, on_device: int, shown: str
) -> None:
    seen = Seen(on_device * canned.GIB, 4 * canned.GIB if on_device else 0)
    line = progress_line(Operation("moving a1", leaves=leaves), seen, 60.0)
    assert line == f"moving a1: 1m{shown}; Ctrl-C leaves it to vgpud"
