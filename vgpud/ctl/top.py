"""`vgpuctl top`: shows devices and tenants live on a terminal, by plain ANSI sequences. Option -1 prints one
sample.
"""

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple

from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import top_draw, top_rows
from vgpud.ctl.connect import connect
from vgpud.ctl.read import SIMULATED
from vgpud.ctl.table import clean
from vgpud.ctl.terminal import Terminal, View, ended_in_order
from vgpud.ctl.top_actions import ACTIONS, Action, Doing
from vgpud.ctl.top_draw import Cell
from vgpud.ctl.top_rows import ASCII, BLOCKS, SORTS, History, Look
from vgpud.model.errors import ErrorCode, Exit, VgpuError

# delay between the two samples of option -1; the daemon's meters are up to 0.5 s old
SAMPLE_SECONDS = 0.7
UNICODE_BLOCKS, ASCII_BLOCKS = "█░", "#."
_WIDE = 10_000  # columns of a sample that is written to a pipe, so that its lines are not cut
_GAP_AND_HEAD = 2
_TENANTS_LEAST = 3
AWAY = (ErrorCode.UNREACHABLE, ErrorCode.STOPPING, ErrorCode.DEADLINE)
FOOT = "q quit  ? help"
HELP = """keys
  up, down   select an allocation, as a click or the wheel; s, r and k ask first
  s          suspend it: its device memory goes to the host, its processes wait
  r          resume it
  k          end its processes by SIGTERM
  o  O       order by the next column; reverse the order
  /          filter by text, as in gpu0; an empty text or Esc shows all
  q          quit

SHARE      part of the time in which the tenant had the device; 0 without time
           slices
HELD BACK  part of the time in which launches were held back for the share
WAITED     part of the time in which the tenant waited for its time slice
OVERRUN    part of the time in which it kept the device after its time slice
REFUSED    allocations of memory that the limit or the full card refused
GIVEN      memory that is allocated to tenants, used or not
LOAD       BUSY as a bar: part of the time in which the device had work

any other key goes back"""
_ARROWS = {"\x1b[A": -1, "\x1b[B": 1, "\x1bOA": -1, "\x1bOB": 1}
# A key as the terminal sends it: an escape sequence (ECMA-48) or a single character.
_KEYS = re.compile(r"\x1b\[<?[0-9;]*[@-~]|\x1bO[ -~]|.", re.S)
_BEGUN = re.compile(r"\x1b(\[<?[0-9;]*|O)?\Z")  # an escape sequence whose end has not been read yet
_SEQUENCE_SECONDS = 0.05
# A mouse event with its line, as xterm reports it in mode 1006 (ctlseqs): left button, wheel up, wheel down.
_MOUSE = re.compile(r"\x1b\[<(0|64|65);[0-9]+;([0-9]+)M")
_WHEEL = {"64": -1, "65": 1}
_ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?1000h\x1b[?1006h"
_LEAVE_SCREEN = "\x1b[?1006l\x1b[?1000l\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def top(arguments: Namespace, terminal: Terminal) -> int:
    """Runs the live display if standard input and output are a terminal. Prints one sample otherwise, and
    with option -1 or an output format for scripts.
    """
    if arguments.once or not terminal.is_text or not _is_live():
        return once(arguments, terminal)
    with connect(arguments) as client:
        Screen(client, arguments, terminal).run()
    return Exit.OK.value


def _is_live() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def look(client: Client) -> Look:
    """Takes a sample of the node. If NVML does not answer, the sample has the reason in place of devices."""
    node = client.get_node()
    devices: list[pb.Device] = []
    if not node.hardware_error:
        devices = list(client.list_devices().devices)
    usage = client.get_usage()
    allocations = list(client.list_allocations().allocations)
    title = f"{node.hostname}  driver {node.driver_version}  vgpud {node.vgpud_version}"
    return Look(
        time.monotonic(),
        devices,
        allocations,
        usage,
        node.simulated,
        node.hardware_error,
        client.list_processes().processes,
        title,
    )


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
    if not terminal.is_text:
        document = {
            "simulated": now.simulated,
            "trouble": now.trouble,
            "devices": [_camel(asdict(row)) for row in devices],
            "tenants": [_camel(row._asdict()) for row in rows],
            "outside": [_camel(row._asdict()) for row in top_rows.outside_rows(now)],
        }
        terminal.show(View("Top", document, [row.allocation for row in rows], []))
    else:
        for line in _drawn(now, rows, Drawn(_WIDE, terminal, _blocks(arguments))):
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


class Drawn(NamedTuple):
    """How the display is drawn. `height` limits the rows of devices, so that tenants have room. `selected` is
    the id of an allocation. The column of `order` is marked with the direction.
    """

    columns: int
    terminal: Terminal
    blocks: str
    height: int | None = None
    past: History | None = None
    selected: str = ""
    order: str = ""
    reverse: bool = False

    def line(self, key: Hashable) -> list[Cell]:
        """The cell with the history of the figure `key`; none if no history is drawn."""
        blocks = BLOCKS if self.blocks == UNICODE_BLOCKS else ASCII
        return [] if self.past is None else [Cell(self.past.line(key, blocks))]

    def heads(self, heads: Sequence[str]) -> Sequence[str]:
        return heads if self.past is None else (*heads, top_draw.HISTORY)

    def marks(self) -> dict[str, str]:
        down, up = "▾▴" if self.blocks == UNICODE_BLOCKS else "v^"
        column = top_draw.SORTED.get(self.order, "")
        return {column: down if top_rows.is_descending(self.order, self.reverse) else up} if column else {}


def _slice_key(row: top_rows.TenantRow) -> Hashable:
    """Identifies a slice among the rows on the screen. The mode's text contains the MIG placement, because an
    allocation can have several instances on one device.
    """
    return row.allocation, row.device, row.mode


def _drawn(now: Look, rows: list[top_rows.TenantRow], how: Drawn) -> list[str]:
    columns, paint = how.columns, how.terminal.paint
    drawn = []
    if now.simulated:
        drawn.append(paint(top_draw.cut(SIMULATED, columns), "yellow"))
    if now.trouble:
        drawn.append(paint(top_draw.cut(clean(now.trouble), columns), "red"))
    cells = [
        [*top_draw.device_cells(row, how.blocks), *how.line(row.uuid)] for row in top_rows.device_rows(now)
    ]
    heads = how.heads(top_draw.DEVICE_HEADS)
    devices = top_draw.lines(heads, cells, columns, paint, top_draw.DEVICE_SPARE)
    if how.height is not None:
        room = how.height - len(drawn) - _GAP_AND_HEAD - min(len(rows), _TENANTS_LEAST)
        devices = top_draw.some(devices, max(3, room), columns)
    tenants = [[*top_draw.tenant_cells(row, how.blocks), *how.line(_slice_key(row))] for row in rows]
    for number, row in enumerate(rows):
        if row.allocation == how.selected:
            tenants[number] = [cell._replace(style="selected") for cell in tenants[number]]
    heads = how.heads(top_draw.TENANT_HEADS)
    below = top_draw.lines(heads, tenants, columns, paint, top_draw.TENANT_SPARE, how.marks())
    outside = [top_draw.outside_cells(row) for row in top_rows.outside_rows(now)]
    if outside:
        below += ["", *top_draw.lines(top_draw.OUTSIDE_HEADS, outside, columns, paint)]
    return [*drawn, *devices, "", *below]


class Screen:
    """The live display. If the daemon restarts, the display waits for it."""

    def __init__(self, client: Client, arguments: Namespace, terminal: Terminal) -> None:
        self.client = client
        self.terminal = terminal
        self.blocks = _blocks(arguments)
        self.delay_seconds: float = arguments.delay
        self.sort: str = arguments.sort
        self.filter: str = arguments.filter
        self.reverse = False
        self.typing = False
        self.selected = ""
        self.asking: Action | None = None
        self.helping = False
        self.shown: list[str] = []  # ids of the allocations that pass the filter, in the order of rows
        self.body: list[str] = []  # the lines on the screen
        self.past = History()
        self.doing = Doing(arguments)
        self.before: Look | None = None
        self.now: Look | None = None
        self.away = ""

    def run(self) -> None:
        with ended_in_order(), _raw_terminal():
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
        busy = [(row.uuid, row.busy_percent) for row in top_rows.device_rows(fresh)]
        rows = top_rows.tenant_rows(fresh, self.before, time.time_ns())
        self.past.add([*busy, *((_slice_key(row), row.share_used_percent) for row in rows)])

    def _pressed(self, seconds: float) -> bool:
        """Waits for a key and handles it. Returns True if `vgpuctl top` is to end."""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return False
        keys = _read_keys()
        if not keys or any(self._key(key) for key in keys):
            return True  # a key ends `vgpuctl top`, or the terminal is gone
        self._draw()
        return False

    def _key(self, key: str) -> bool:
        if len(key) > 1:
            if not self.typing and self.asking is None:
                self._point(key)
        elif self.typing:
            self._type(key)
        elif self.asking is not None:
            if key == "y":
                self.doing.begin(self.asking, self.selected)
            self.asking = None
        elif key in ("q", "\x03", "\x04"):
            return True
        elif self.helping or key == "?":
            self.helping = not self.helping
        elif key == "o":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "O":
            self.reverse = not self.reverse
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == "\x1b":
            self.filter = self.selected = self.doing.said = ""
        elif key in ACTIONS and self.selected in self.shown and not self.doing.is_busy:
            self.asking = ACTIONS[key]
        return False

    def _point(self, key: str) -> None:
        """Selects an allocation by an arrow key, the wheel, or a click on a row that names it."""
        event = _MOUSE.fullmatch(key)
        if key in _ARROWS:
            self._select(_ARROWS[key])
        elif event and event[1] in _WHEEL:
            self._select(_WHEEL[event[1]])
        elif event and int(event[2]) <= len(self.body):
            line = self.body[int(event[2]) - 1]
            self.selected = next((name for name in self.shown if name in line), self.selected)

    def _select(self, step: int) -> None:
        """Selects the next allocation on the screen (or the previous one); the first if none is selected."""
        names = list(dict.fromkeys(self.shown))
        if self.selected in names:
            self.selected = names[min(max(0, names.index(self.selected) + step), len(names) - 1)]
        else:
            self.selected = names[0] if names else ""

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
        self.shown = [row.allocation for row in kept]
        if self.helping:
            body = [top_draw.cut(line, columns) for line in HELP.splitlines()]
        else:
            head = top_draw.cut(f"{clean(self.now.title)}  {time.strftime('%H:%M:%S')}", columns)
            how = Drawn(
                columns,
                self.terminal,
                self.blocks,
                height - 2,
                self.past,
                self.selected,
                self.sort,
                self.reverse,
            )
            body = [head, *_drawn(self.now, kept[self._scrolled(kept, height) :], how)]
        self.body = body = body[: height - 1]
        foot = top_draw.cut(self._foot(len(kept), len(rows)), columns)
        text = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in body)
        text += _CLEAR_BELOW + f"\x1b[{height};1H" + self.terminal.paint(foot, "bold") + _CLEAR_LINE
        sys.stdout.write(_HOME + text)
        sys.stdout.flush()

    def _scrolled(self, kept: list[top_rows.TenantRow], height: int) -> int:
        """The number of tenants' rows that are scrolled away at the top, so that the selected row is on the
        screen.
        """
        at = self.shown.index(self.selected) if self.selected in self.shown else 0
        devices = 0 if self.now is None else len(self.now.devices)
        room = max(_TENANTS_LEAST, height - devices - 2 * _GAP_AND_HEAD - 2)
        return min(max(0, at - room + 1), max(0, len(kept) - 1))

    def _foot(self, kept: int, all_rows: int) -> str:
        if self.typing:
            return f"filter: {self.filter}_"
        if self.away:
            return f"waiting: {self.away}"
        if self.asking is not None:
            return f"{self.asking.question.format(self.selected)} y, or any other key"
        if self.doing.said:
            return f"{self.doing.said}  Esc"
        filtered = f"  filter {self.filter!r}" if self.filter else ""
        order = f"{self.sort}{' reversed' if self.reverse else ''}"
        return f"{kept} of {all_rows} slices  by {order}{filtered}  {FOOT}"


def _read_keys() -> list[str]:
    """Reads the keys that were pressed; none at the end of the input. After an Esc it waits shortly for the
    rest of an escape sequence, because the key Esc alone sends no more.
    """
    text = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    while _BEGUN.search(text) and select.select([sys.stdin], [], [], _SEQUENCE_SECONDS)[0]:
        more = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not more:
            break
        text += more
    return _KEYS.findall(text)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Yields with a terminal that delivers single keys, on the alternate screen; restores the terminal in
    every case, also while the process is stopped by SIGTSTP (Ctrl-Z).
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def enter() -> None:
        tty.setcbreak(descriptor)
        os.write(sys.stdout.fileno(), _ENTER_SCREEN.encode())

    # writes to the descriptor directly, because a signal handler must not enter stdout's buffer
    def leave() -> None:
        os.write(sys.stdout.fileno(), _LEAVE_SCREEN.encode())
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def stop(_number: int, _frame: object) -> None:
        leave()
        signal.raise_signal(signal.SIGSTOP)  # the process stops here until SIGCONT
        enter()

    old = signal.signal(signal.SIGTSTP, stop)
    try:
        enter()
        yield
    finally:
        signal.signal(signal.SIGTSTP, old)
        sys.stdout.flush()
        leave()
