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
from vgpud.ctl.progress import progress_line

SUSPEND = ("suspend", "a1b2c3d4")


@pytest.fixture
def ready(daemon: Daemon) -> Iterator[threading.Event]:
    """The daemon finishes a suspension when this event is set."""
    event = threading.Event()

    def suspend(request: object) -> pb.Allocation:
        assert event.wait(60)
        return canned.preload()

    daemon.replies["Suspend"] = suspend
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


def test_the_line_does_not_wrap_in_a_narrow_terminal(daemon: Daemon, ready: threading.Event) -> None:
    live = Live(daemon, verb=SUSPEND, columns=40)
    try:
        live.until("\rsuspending a1b2c3d4: 2s, 1GiB of 1GiB")
        ready.set()
        assert live.process.wait(30) == 0
    finally:
        live.close()
    lines = re.findall(r"\r(suspending [^\x1b\r]*)", live.text)
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


def test_an_operation_without_memory_shows_only_its_time() -> None:
    assert progress_line("moving a1", 0, 0, 75.0) == "moving a1: 1m; Ctrl-C leaves it to vgpud"
