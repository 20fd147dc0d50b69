"""`vgpuctl watch`: each event once, across restarts of the daemon, until it is interrupted."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests import prepared
from tests.ctl import canned
from tests.ctl.conftest import Ctl, environment
from tests.ctl.daemon import Daemon
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError


@contextmanager
def watching(daemon: Daemon, *options: str) -> Iterator[prepared.Command]:
    process = prepared.ctl(["watch", *options], environment(daemon.socket), pipe=True)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for which the server's streams wait. It is set after the test, so the server's threads
    end.
    """
    event = threading.Event()
    yield event
    event.set()


def events(
    *revisions: int, gate: threading.Event | None = None, fail: VgpuError | None = None
) -> Callable[[pb.WatchRequest], Iterator[pb.Event]]:
    def stream(_request: pb.WatchRequest) -> Iterator[pb.Event]:
        for revision in revisions:
            yield canned.event(revision)
        if gate is not None:
            gate.wait(300)
        if fail is not None:
            raise fail

    return stream


def line(process: prepared.Command) -> str:
    return process.stdout.readline()


def interrupt(process: prepared.Command) -> str:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in said
    return said


def test_watch_prints_events_line_by_line_until_interrupted(daemon: Daemon, gate: threading.Event) -> None:
    daemon.watches = [events(42, 43, gate=gate)]
    with watching(daemon) as process:
        assert line(process) == "42  2026-01-01T00:00:00Z  allocation_released  a1b2c3d4  released\n"
        assert line(process).startswith("43  ")
        assert interrupt(process) == ""
    (request,) = daemon.requests("Watch")
    assert request.after_revision == 41


def test_watch_prints_each_event_as_one_line_of_json(daemon: Daemon, gate: threading.Event) -> None:
    daemon.watches = [events(42, gate=gate)]
    with watching(daemon, "-o", "json", "--after", "7") as process:
        document = json.loads(line(process))
        interrupt(process)
    assert document == {
        "apiVersion": "vgpud.io/v1",
        "kind": "Event",
        "type": "allocation_released",
        "revision": 42,
        "subject": "a1b2c3d4",
        "sentence": "released",
        "time": "2026-01-01T00:00:00.000000007Z",
        "allocation": None,
    }
    assert daemon.requests("Watch")[0].after_revision == 7


def test_watch_resumes_when_the_daemon_restarts(daemon: Daemon, gate: threading.Event) -> None:
    daemon.watches = [events(42, 43, gate=gate), events(44, gate=gate)]
    with watching(daemon) as process:
        line(process)
        line(process)
        gate.set()
        daemon.stop()
        daemon.replies["GetNode"].revision = 44
        gate.clear()
        daemon.start()
        assert line(process).startswith("44  ")
        assert interrupt(process) == "vgpud is away, waiting for it\nvgpud is back\n"
    assert [request.after_revision for request in daemon.requests("Watch")] == [41, 43]


def test_watch_resumes_after_the_daemon_stops_and_starts(daemon: Daemon, gate: threading.Event) -> None:
    goodbye = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    daemon.replies["GetNode"].revision = 42
    daemon.watches = [events(42, fail=goodbye), events(43, gate=gate)]
    with watching(daemon, "-q") as process:
        assert line(process).startswith("42  ")
        assert line(process).startswith("43  ")
        assert interrupt(process) == ""


def test_watch_reports_lost_events(daemon: Daemon, gate: threading.Event) -> None:
    goodbye = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    gone = VgpuError(ErrorCode.BAD_REVISION, "events after revision 42 are no longer kept", "")
    daemon.replies["GetNode"].revision = 90
    daemon.watches = [events(42, fail=goodbye), events(fail=gone), events(91, gate=gate)]
    with watching(daemon, "-o", "json") as process:
        kinds = [json.loads(line(process)) for _ in range(3)]
        said = interrupt(process)
    assert [document["kind"] for document in kinds] == ["Event", "Gap", "Event"]
    assert (kinds[1]["afterRevision"], kinds[1]["resumedRevision"]) == (42, 90)
    assert "events after revision 42 are lost, going on from 90" in said
    assert [request.after_revision for request in daemon.requests("Watch")] == [90, 42, 90]


def test_watch_continues_and_says_so_if_the_revisions_start_again(
    daemon: Daemon, gate: threading.Event
) -> None:
    goodbye = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    daemon.replies["GetNode"].revision = 3
    daemon.watches = [events(42, fail=goodbye), events(4, gate=gate)]
    with watching(daemon, "--after", "41") as process:
        assert line(process).startswith("42  ")
        assert line(process).startswith("4  ")
        assert "going on from 3" in interrupt(process)


def test_a_watch_from_a_revision_that_is_no_longer_kept_is_an_error(ctl: Ctl, daemon: Daemon) -> None:
    gone = VgpuError(ErrorCode.BAD_REVISION, "events after revision 1 are no longer kept", "start at 30")
    daemon.watches = [events(fail=gone)]
    done = ctl("watch", "--after", "1")
    assert done.returncode == 2
    assert "events after revision 1 are no longer kept (E105)" in done.stderr


def test_watch_fails_at_once_without_a_daemon_at_the_start(ctl: Ctl, daemon: Daemon) -> None:
    daemon.stop()
    assert ctl("watch").returncode == 32
