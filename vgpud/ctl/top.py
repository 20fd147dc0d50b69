"""`vgpuctl top`: devices and tenants, live. Plain ANSI on a terminal, one look with -1."""

import os
import select
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import top_draw, top_rows
from vgpud.ctl.connect import connect
from vgpud.ctl.read import SIMULATED
from vgpud.ctl.table import clean
from vgpud.ctl.terminal import Terminal, View
from vgpud.ctl.top_rows import SORTS, Look
from vgpud.model.errors import ErrorCode, Exit, VgpuError

# the daemon's own meters are up to half a second old
SAMPLE_SECONDS = 0.7
UNICODE_BLOCKS, ASCII_BLOCKS = "█░", "#."
_WIDE = 10_000  # one look into a pipe is not cut
_GAP_AND_HEAD = 2
_TENANTS_LEAST = 3
AWAY = (ErrorCode.UNREACHABLE, ErrorCode.STOPPING, ErrorCode.DEADLINE)
HELP = "q quit  s sort  r reverse  / filter  j k scroll"
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def top(arguments: Namespace, terminal: Terminal) -> int:
    """Live only where both ends are a terminal; else, and with -1, one look."""
    if arguments.once or terminal.is_machine or terminal.output == "name" or not _is_live():
        return once(arguments, terminal)
    with connect(arguments) as client:
        Screen(client, arguments, terminal).run()
    return Exit.OK.value


def _is_live() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def look(client: Client) -> Look:
    """Without hardware there are no devices, and the look says why."""
    node = client.get_node()
    devices: list[pb.Device] = []
    if not node.hardware_error:
        devices = list(client.list_devices().devices)
    usage = client.get_usage()
    allocations = list(client.list_allocations().allocations)
    return Look(time.monotonic(), devices, allocations, usage, node.simulated, node.hardware_error)


def once(arguments: Namespace, terminal: Terminal) -> int:
    with connect(arguments) as client:
        before = look(client)
        now = before
        metered = (meter for item in before.usage.allocations for meter in item.slices)
        if any(meter.HasField("compute_used_ns") for meter in metered):
            time.sleep(SAMPLE_SECONDS)
            now = look(client)
    rows = top_rows.chosen(
        top_rows.tenant_rows(now, before, time.time_ns()), arguments.sort, False, arguments.filter
    )
    devices = top_rows.device_rows(now)
    if terminal.is_machine or terminal.output == "name":
        document = {
            "simulated": now.simulated,
            "trouble": now.trouble,
            "devices": [_camel(asdict(row)) for row in devices],
            "tenants": [_camel(row._asdict()) for row in rows],
        }
        terminal.show(View("Top", document, [row.allocation for row in rows], []))
    else:
        for line in _drawn(now, rows, _WIDE, terminal, _blocks(arguments)):
            print(line)
    return Exit.OK.value


def _camel(row: dict[str, object]) -> dict[str, object]:
    def name(key: str) -> str:
        first, *rest = key.split("_")
        return first + "".join(word.capitalize() for word in rest)

    return {name(key): value for key, value in row.items()}


def _blocks(arguments: Namespace) -> str:
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return UNICODE_BLOCKS if unicode and not arguments.ascii else ASCII_BLOCKS


def _drawn(
    now: Look,
    rows: list[top_rows.TenantRow],
    columns: int,
    terminal: Terminal,
    blocks: str,
    height: int | None = None,
) -> list[str]:
    """With a `height`, devices leave room for some tenants, and say how many of them are not shown."""
    drawn = []
    if now.simulated:
        drawn.append(terminal.paint(top_draw.cut(SIMULATED, columns), "yellow"))
    if now.trouble:
        drawn.append(terminal.paint(top_draw.cut(clean(now.trouble), columns), "red"))
    cells = [top_draw.device_cells(row, blocks) for row in top_rows.device_rows(now)]
    devices = top_draw.lines(top_draw.DEVICE_HEADS, cells, columns, terminal.paint, top_draw.DEVICE_SPARE)
    if height is not None:
        room = height - len(drawn) - _GAP_AND_HEAD - min(len(rows), _TENANTS_LEAST)
        devices = top_draw.some(devices, max(3, room), columns)
    tenants = [top_draw.tenant_cells(row, blocks) for row in rows]
    return [
        *drawn,
        *devices,
        "",
        *top_draw.lines(top_draw.TENANT_HEADS, tenants, columns, terminal.paint, top_draw.TENANT_SPARE),
    ]


class Screen:
    """The live display; a daemon that restarts is waited for."""

    def __init__(self, client: Client, arguments: Namespace, terminal: Terminal) -> None:
        self.client = client
        self.terminal = terminal
        self.blocks = _blocks(arguments)
        self.delay_seconds: float = arguments.delay
        self.sort: str = arguments.sort
        self.filter: str = arguments.filter
        self.reverse = False
        self.typing = False
        self.scroll = 0
        self.before: Look | None = None
        self.now: Look | None = None
        self.away = ""

    def run(self) -> None:
        with _raw_terminal():
            while True:
                self._look()
                until = time.monotonic() + self.delay_seconds
                self._draw()
                while (left := until - time.monotonic()) > 0:
                    if self._pressed(left):
                        return

    def _look(self) -> None:
        try:
            fresh = look(self.client)
        except VgpuError as error:
            if error.code not in AWAY or self.now is None:
                raise
            self.away = error.sentence
            return
        self.before, self.now, self.away = self.now, fresh, ""

    def _pressed(self, seconds: float) -> bool:
        """Handles a key. True if `vgpuctl top` is to end."""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return False
        keys = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not keys:
            return True  # the terminal is gone
        if keys in ("\x1b[A", "\x1b[B"):
            keys = "k" if keys == "\x1b[A" else "j"
        for key in keys:
            if self._key(key):
                return True
        self._draw()
        return False

    def _key(self, key: str) -> bool:
        if self.typing:
            self._type(key)
        elif key in ("q", "\x03", "\x04"):
            return True
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key in ("j", "k"):
            self.scroll = max(0, self.scroll + (1 if key == "j" else -1))
        return False

    def _type(self, key: str) -> None:
        if key in ("\r", "\n", "\x1b"):
            self.typing = False
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key

    def _draw(self) -> None:
        if self.now is None:
            return
        columns, height = os.get_terminal_size(sys.stdout.fileno())
        rows = top_rows.tenant_rows(self.now, self.before, time.time_ns())
        kept = top_rows.chosen(rows, self.sort, self.reverse, self.filter)
        self.scroll = min(self.scroll, max(0, len(kept) - 1))
        body = _drawn(self.now, kept[self.scroll :], columns, self.terminal, self.blocks, height - 1)
        body = body[: height - 1]
        foot = top_draw.cut(self._foot(len(kept), len(rows)), columns)
        text = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in body)
        text += _CLEAR_BELOW + f"\x1b[{height};1H" + self.terminal.paint(foot, "bold") + _CLEAR_LINE
        sys.stdout.write(_HOME + text)
        sys.stdout.flush()

    def _foot(self, kept: int, all_rows: int) -> str:
        if self.typing:
            return f"filter: {self.filter}_"
        if self.away:
            return f"waiting: {self.away}"
        filtered = f"  filter {self.filter!r}" if self.filter else ""
        order = f"{self.sort}{' reversed' if self.reverse else ''}"
        return f"{kept} of {all_rows} slices  by {order}{filtered}  {HELP}"


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Keys one by one, on a screen of our own; whatever happens, the terminal is given back as it was."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        sys.stdout.write(_ENTER_SCREEN)
        yield
    finally:
        sys.stdout.write(_LEAVE_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
