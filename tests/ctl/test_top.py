"""`vgpuctl top`: rows from two samples, lines that fit, and the live display on a pseudo-terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import prepared
from tests.ctl import canned
from tests.ctl.conftest import Ctl, environment
from tests.ctl.daemon import Daemon
from tests.e2e.support import eventually
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.table import width
from vgpud.ctl.terminal import ended_in_order
from vgpud.ctl.top import HELP
from vgpud.ctl.top_draw import (
    DEVICE_HEADS,
    SORTED,
    TENANT_HEADS,
    TENANT_SPARE,
    cut,
    device_cells,
    lines,
    plain,
    some,
    tenant_cells,
)
from vgpud.ctl.top_rows import SORTS, History, Look, TenantRow, chosen, device_rows, tenant_rows
from vgpud.model.errors import ErrorCode, VgpuError

GIB = 2**30
PLACES = re.compile(r"\r+\n|\x1b\[[0-9;]*H")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def look(seconds: float, used_ns: int = 0, waited_ns: int = 0, **meter: object) -> Look:
    return Look(
        seconds,
        canned.devices().devices,
        canned.allocations().allocations,
        canned.usage(used_ns, waited_ns, **meter),
    )


def test_rates_are_computed_between_two_samples() -> None:
    turns = {"compute_granted_ns": 6 * 10**8, "compute_overrun_ns": 2 * 10**7, "compute_bypasses": 2}
    rows = tenant_rows(look(12.0, 10**9, 4 * 10**8, **turns), look(10.0, 5 * 10**8), 0)
    (row,) = [row for row in rows if row.allocation == "a1b2c3d4"]
    assert row.share_used_percent == pytest.approx(25.0)
    assert row.waited_percent == pytest.approx(20.0)
    assert row.overrun_percent == pytest.approx(1.0)
    assert row.bypasses == 2
    (other,) = [row for row in rows if row.allocation == "e5f6a7b8"]
    assert other.share_used_percent is None  # the mode of the second device does not meter compute time
    first = tenant_rows(look(12.0, 10**9), None, 0)
    assert {row.share_used_percent for row in first} == {None}


def test_a_suspended_tenants_row_shows_the_memory_that_stays_on_the_device() -> None:
    allocations = canned.allocations().allocations
    allocations[0].state, allocations[0].stays_bytes = "suspended", 2 * GIB
    sample = look(12.0)._replace(allocations=allocations)
    assert tenant_rows(look(12.0), None, 0)[0].memory_used_bytes == 3 * GIB
    assert tenant_rows(sample, None, 0)[0].memory_used_bytes == 2 * GIB


def test_a_counter_that_was_reset_gives_no_negative_share() -> None:
    rows = tenant_rows(look(12.0, 0), look(10.0, 5 * 10**8), 0)
    assert rows[0].share_used_percent == 0.0


def test_a_lost_device_stays_a_row_with_the_reason() -> None:
    lost = Look(0.0, canned.devices("lost").devices, [], pb.UsageReply())
    cells = [device_cells(row, "#.") for row in device_rows(lost)]
    text = lines(DEVICE_HEADS, cells, 300, plain)
    assert len(text) == 4
    assert "lost: " in text[3]
    assert " -  " in text[3]  # the device reports no temperature


ROW = TenantRow(
    "a1",
    "alice",
    "0",
    "preload",
    "active",
    3 * GIB,
    4 * GIB,
    None,
    25.0,
    20.0,
    1.0,
    2.0,
    0.5,
    2,
    3,
    1,
    60.0,
    "训练 job",
)


def test_rows_are_sorted_and_filtered() -> None:
    rows = [
        ROW,
        ROW._replace(allocation="b2", memory_used_bytes=GIB, device="10", waited_percent=50.0, owner="bob"),
        ROW._replace(allocation="c3", memory_used_bytes=2 * GIB, device="2", refused=None, age_seconds=1.0),
    ]

    def order(sort: str, reverse: bool = False, text: str = "") -> list[str]:
        return [row.allocation for row in chosen(rows, sort, reverse, text)]

    assert order("memory") == ["a1", "c3", "b2"]
    assert order("memory", reverse=True) == ["b2", "c3", "a1"]
    assert order("device") == ["a1", "c3", "b2"]
    assert order("waited")[0] == "b2"
    assert order("age")[0] == "c3"
    assert order("memory", text="GPU2") == ["c3"]
    assert order("memory", text="BOB") == ["b2"]
    assert order("memory", text="nothing") == []
    assert {len(order(sort)) for sort in SORTS} == {3}


@pytest.mark.parametrize("columns", [1, 7, 40, 80, 120, 400])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    drawn = lines(TENANT_HEADS, [tenant_cells(ROW, "█░")], columns, plain)
    assert max(width(line) for line in drawn) <= columns
    assert width(cut("训练训练", 3)) == 2


def test_a_narrow_terminal_drops_the_least_important_columns() -> None:
    def heads(columns: int) -> list[str]:
        shown = lines(TENANT_HEADS, [tenant_cells(ROW, "█░")], columns, plain, TENANT_SPARE)
        return [head for head in TENANT_HEADS if head in shown[0]]

    assert heads(400) == list(TENANT_HEADS)
    assert {"ALLOCATION", "GPU", "USED / LIMIT", "SHARE", "WAITED", "LABEL"} <= set(heads(100))
    assert "OVERRUN" not in heads(100)


def test_the_column_that_sorts_the_rows_is_marked() -> None:
    assert set(SORTED) == set(SORTS) and set(SORTED.values()) <= set(TENANT_HEADS)
    shown = lines(TENANT_HEADS, [], 400, plain, marks={SORTED["waited"]: "v"})
    assert "WAITEDv  OVERRUN" in shown[0]


def test_the_help_fits_on_a_terminal_of_the_usual_size() -> None:
    assert max(map(len, HELP.splitlines())) <= 80 and len(HELP.splitlines()) < 24


def test_a_low_terminal_shows_the_number_of_hidden_devices() -> None:
    devices = ["head", *"01234567"]
    assert some(devices, 9, 80) == devices
    assert some(devices, 5, 80) == ["head", "0", "1", "2", "and 5 devices more"]


def test_control_characters_of_tenants_do_not_reach_the_terminal() -> None:
    evil = ROW._replace(label="\x1b]0;x\x07", owner="a\nb")
    assert "\x1b" not in "".join(lines(TENANT_HEADS, [tenant_cells(evil, "#.")], 400, plain))


def test_top_with_one_sample_prints_once_and_ends(main: Ctl, daemon: Daemon) -> None:
    done = main("top", "-1", "--filter", "a1b2")
    assert done.returncode == 0
    assert "a1b2c3d4" in done.stdout
    assert "e5f6a7b8" not in done.stdout
    assert "NVIDIA H200" in done.stdout
    assert "\x1b" not in done.stdout


def test_top_without_nvml_shows_the_reason(main: Ctl, daemon: Daemon) -> None:
    daemon.replies["GetNode"] = canned.node(hardware_error="the driver is not loaded")
    done = main("top", "-1")
    assert done.returncode == 0
    assert "the driver is not loaded" in done.stdout


class Live:
    """vgpuctl top on a pseudo-terminal of 20 lines."""

    def __init__(
        self, daemon: Daemon, *words: str, verb: Sequence[str] = ("top", "-d", "0.2"), columns: int = 100
    ) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        given = {**environment(daemon.socket), "TERM": "xterm"}
        self.process = prepared.program("vgpud.ctl.main", [*verb, *words], given, theirs, theirs, theirs)
        self.text = ""

    def until(self, wanted: str, since: int = 0) -> None:
        end = time.monotonic() + 300
        while wanted not in self.text[since:]:
            assert time.monotonic() < end, f"{wanted!r} did not come: {self.text[-2000:]!r}"
            ready, _, _ = select.select([self.ours], [], [], 0.5)
            if ready:
                self.text += os.read(self.ours, 65536).decode(errors="replace")

    def press(self, keys: str) -> int:
        os.write(self.ours, keys.encode())
        return len(self.text)

    def end(self) -> int:
        os.write(self.ours, b"q")
        end = time.monotonic() + 300
        while (code := self.process.poll()) is None:
            assert time.monotonic() < end, "it does not end"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.text += os.read(self.ours, 65536).decode(errors="replace")
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def test_top_handles_keys_and_a_daemon_restart_and_restores_the_terminal(daemon: Daemon) -> None:
    live = Live(daemon)
    try:
        live.until("by memory")
        live.until("a1b2c3d4")
        live.until("by share", live.press("o"))
        live.until("reversed", live.press("O"))
        live.until("device memory goes to the host", live.press("?"))
        live.until("by share", live.press("?"))
        live.until("filter: _", live.press("/"))
        at = live.press("e5f6\r")
        live.until("1 of ", at)
        live.until("filter 'e5f6'", at)
        daemon.stop()
        live.until("waiting: ", len(live.text))
        daemon.socket.unlink(missing_ok=True)
        daemon.start()
        live.until("1 of ", len(live.text))
        assert live.end() == 0
        assert live.text.rstrip().endswith("\x1b[?1049l")
        assert termios.tcgetattr(live.theirs) == live.before
    finally:
        live.close()
    drawn = [ANSI.sub("", line) for line in PLACES.split(live.text)]
    assert max((width(line), line) for line in drawn)[0] <= 100


def test_an_error_ends_top_and_restores_the_terminal(daemon: Daemon) -> None:
    daemon.replies["ListDevices"] = VgpuError(ErrorCode.BUG, "broken", "")
    live = Live(daemon)
    try:
        live.until("broken")
        assert live.process.wait(300) == 70
        assert termios.tcgetattr(live.theirs) == live.before
    finally:
        live.close()


def test_a_watched_listing_is_drawn_again_across_a_restart_of_the_daemon(daemon: Daemon) -> None:
    live = Live(daemon, verb=("ls", "-w"))
    live.until("a1b2c3d4")
    since = len(live.text)
    daemon.replies["ListAllocations"] = VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "")
    live.until("waiting: vgpud is stopping", since)
    since = len(live.text)
    daemon.replies["ListAllocations"] = canned.allocations()
    live.until("a1b2c3d4", since)
    live.process.send_signal(signal.SIGINT)
    assert live.process.wait(300) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_top_restores_the_terminal(daemon: Daemon, number: signal.Signals) -> None:
    live = Live(daemon)
    try:
        live.until("by memory")
        live.process.send_signal(number)
        live.until("\x1b[?25h\x1b[?1049l")
        assert live.process.wait(300) == 128 + number
        assert termios.tcgetattr(live.theirs) == live.before
    finally:
        live.close()


def test_a_program_with_a_handler_of_its_own_gets_it_back() -> None:
    def own(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit, match="143"), ended_in_order():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stopped_top_restores_the_terminal_and_redraws_when_continued(daemon: Daemon) -> None:
    live = Live(daemon)
    try:
        live.until("by memory")
        live.process.send_signal(signal.SIGTSTP)
        live.until("\x1b[?25h\x1b[?1049l")
        status = Path(f"/proc/{live.process.pid}/stat")
        eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        assert termios.tcgetattr(live.theirs) == live.before
        since = len(live.text)
        live.process.send_signal(signal.SIGCONT)
        live.until("\x1b[?1049h", since)
        live.until("by memory", since)
    finally:
        live.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_watched_listing_restores_the_terminal(
    daemon: Daemon, number: signal.Signals
) -> None:
    live = Live(daemon, verb=("ls", "-w"))
    try:
        live.until("a1b2c3d4")
        live.process.send_signal(number)
        assert live.process.wait(300) == 128 + number
        live.until("\x1b[?7h")
    finally:
        live.close()


def test_a_watched_listing_draws_its_messages(daemon: Daemon) -> None:
    daemon.replies["ListProcesses"] = pb.ListProcessesReply()
    live = Live(daemon, verb=("ps", "-w"))
    try:
        live.until("every 2 s")
        live.until("no process runs on a device\x1b[K")
    finally:
        live.close()


def test_a_listing_into_a_pipe_is_not_watched(main: Ctl) -> None:
    assert main("ls", "-w").returncode == 2


def test_watch_is_refused_for_an_output_format_that_is_no_table(daemon: Daemon) -> None:
    live = Live(daemon, verb=("ls", "-w", "-o", "name"))
    try:
        live.until("--watch draws tables on a terminal")
        assert live.process.wait(300) == 2
    finally:
        live.close()


def test_a_selected_allocation_is_suspended_after_a_confirmation(daemon: Daemon) -> None:
    live = Live(daemon)
    try:
        live.until("a1b2c3d4")
        live.until("\x1b[7ma1b2c3d4", live.press("\x1b[B"))
        live.until("suspend a1b2c3d4? y", live.press("s"))
        live.until("? help", live.press("n"))
        assert daemon.requests("Suspend") == []
        live.until("suspend a1b2c3d4? y", live.press("s"))
        live.until("a1b2c3d4 is suspended", live.press("y"))
        assert live.end() == 0
    finally:
        live.close()
    assert [request.allocation_id for request in daemon.requests("Suspend")] == ["a1b2c3d4"]


def test_held_arrow_keys_move_the_selection_and_change_nothing_else(daemon: Daemon) -> None:
    live = Live(daemon)
    try:
        live.until("a1b2c3d4")
        live.press("/a1b2\r")
        live.until("filter 'a1b2'")
        live.until("\x1b[7ma1b2c3d4", live.press("\x1b[A\x1b[B\x1bOA\x1bOB\x1b[5~"))
        live.press("\x1b")
        since = live.press("[B")
        live.until("\x1b[7ma1b2c3d4", since)
        assert "filter 'a1b2'" in live.text[since:]
        assert "reversed" not in live.text
        assert live.end() == 0
    finally:
        live.close()


def test_the_processes_of_a_selected_allocation_are_ended_after_a_confirmation(daemon: Daemon) -> None:
    with subprocess.Popen(["sleep", "3600"]) as mine, subprocess.Popen(["sleep", "3600"]) as other:
        listed = [pb.NodeProcess(pid=mine.pid, allocation_id="a1b2c3d4"), pb.NodeProcess(pid=other.pid)]
        daemon.replies["ListProcesses"] = pb.ListProcessesReply(processes=listed)
        live = Live(daemon)
        try:
            live.until("a1b2c3d4")
            live.until("\x1b[7ma1b2c3d4", live.press("\x1b[B"))
            live.until("end the processes of a1b2c3d4 by SIGTERM? y", live.press("k"))
            live.until("? help", live.press("n"))
            assert mine.poll() is None
            live.until("end the processes of a1b2c3d4 by SIGTERM? y", live.press("k"))
            live.until("1 process of a1b2c3d4 got SIGTERM", live.press("y"))
            assert live.end() == 0
            assert mine.wait(300) == -signal.SIGTERM and other.poll() is None
        finally:
            live.close()
            mine.kill()
            other.kill()


def test_the_wheel_and_a_click_select_an_allocation(daemon: Daemon) -> None:
    live = Live(daemon, verb=("top", "-d", "3600"))  # the screen is drawn once, and then after each key
    try:
        live.until("\x1b[?1006h")
        live.until("? help")
        screen = PLACES.split(live.text.rpartition("\x1b[H")[2])
        (line,) = (number for number, row in enumerate(screen, 1) if "a1b2c3d4" in row)
        live.until("\x1b[7ma1b2c3d4", live.press("\x1b[<65;1;1M"))
        live.until("\x1b[7me5f6a7b8", live.press("\x1b[<65;1;1M"))
        live.until("\x1b[7ma1b2c3d4", live.press(f"\x1b[<0;9;{line}M\x1b[<0;9;{line}m"))
        live.until("\x1b[7me5f6a7b8", live.press("\x1b[<65;1;1M"))
        live.until("\x1b[7ma1b2c3d4", live.press("\x1b[<64;1;1M"))
        assert live.end() == 0
    finally:
        live.close()
    assert "\x1b[?1000l" in live.text


def test_vgpuctl_top_lists_processes_outside_vgpud_in_rows_of_their_own(main: Ctl, daemon: Daemon) -> None:
    said = main("top", "-1").stdout
    assert re.search(r"4343 +1 +- +outside vgpud", said)
    (row,) = json.loads(main("top", "-1", "-o", "json").stdout)["outside"]
    assert (row["pid"], row["allocation"]) == (4343, "")


def test_each_character_of_a_history_is_the_mean_of_ten_seconds() -> None:
    past = History()
    for percent in [0.0] * 5 + [100.0] * 5 + [50.0, None]:
        past.add([("gpu", percent), ("gone", 1.0)])
    assert past.line("gpu", "012") == "012"
    past.add([("gpu", None)] * 1)
    assert past.line("gone", "012") == ""


def test_two_slices_on_one_device_have_histories_of_their_own(daemon: Daemon) -> None:
    item = canned.mig()
    item.slices[0].share_percent = 50
    item.slices.append(item.slices[0])
    item.slices[1].mig.placement.start = 4

    def usage(_request: object) -> pb.UsageReply:
        # far more than the time that passes, so that a late sample is full, too
        meters = [pb.SliceMeter(compute_used_ns=used) for used in (10 * time.monotonic_ns(), 0)]
        return pb.UsageReply(allocations=[pb.AllocationMeters(allocation_id=item.id, slices=meters)])

    daemon.replies["ListAllocations"] = canned.allocations(item)
    daemon.replies["GetUsage"] = usage
    live = Live(daemon, columns=200)
    try:
        for _ in range(3):
            live.until("by memory", len(live.text))
    finally:
        live.close()
    drawn = [ANSI.sub("", line).rstrip() for line in PLACES.split(live.text)]
    assert "█" in {line[-1] for line in drawn if "1g.18gb@2" in line}
    of_the_second = {line[-1] for line in drawn if "1g.18gb@4" in line}
    assert "▁" in of_the_second and "█" not in of_the_second
