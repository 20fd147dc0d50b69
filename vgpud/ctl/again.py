"""The option `--watch`: prints a listing repeatedly until it is interrupted."""

import io
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

from vgpud.ctl.terminal import Terminal, ended_in_order, wants_color
from vgpud.model.errors import ErrorCode, VgpuError

PAUSE_SECONDS = 2.0
_CLEAR, _HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"
# escape sequences of DECAWM: without automatic wrapping, the terminal cuts long lines
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_AWAY = (ErrorCode.UNREACHABLE, ErrorCode.STOPPING, ErrorCode.DEADLINE)

Function = Callable[[Namespace, Terminal], int]


def again(function: Function, arguments: Namespace, terminal: Terminal) -> int:
    """Prints the listing repeatedly. An interrupt or an error ends it; it never returns. If the daemon stops
    answering after the first listing, vgpuctl waits for it. Raises VgpuError(BAD_REQUEST) if standard output
    is no terminal, or the output format is no table.
    """
    if not sys.stdout.isatty() or terminal.output not in ("table", "wide"):
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            "--watch draws tables on a terminal",
            "'vgpuctl watch -o json' prints events for programs",
        )
    color = "always" if wants_color(terminal.color, sys.stdout, os.environ) else "never"
    painted = terminal._replace(color=color)
    is_first = True
    with ended_in_order():
        try:
            while True:
                text = _text(function, arguments, painted, is_first)
                sys.stdout.write((_CLEAR if is_first else "") + _HOME + _NO_WRAP + text + _WRAP)
                sys.stdout.flush()
                is_first = False
                time.sleep(PAUSE_SECONDS)
        finally:
            sys.stdout.write(_WRAP)
            sys.stdout.flush()


def _text(function: Function, arguments: Namespace, terminal: Terminal, is_first: bool) -> str:
    _, height = os.get_terminal_size(sys.stdout.fileno())
    written = io.StringIO()
    try:
        with redirect_stdout(written), redirect_stderr(written):
            function(arguments, terminal)
        lines = written.getvalue().splitlines()
    except VgpuError as error:
        if is_first or error.code not in _AWAY:
            raise
        lines = [f"waiting: {error.sentence}"]
    head = f"every {PAUSE_SECONDS:g} s, {time.strftime('%H:%M:%S')}; Ctrl-C ends it"
    shown = [head, "", *lines]
    if len(shown) > height - 1:
        shown = [*shown[: height - 2], f"and {len(shown) - height + 2} lines more"]
    return "".join(f"{line}{_CLEAR_LINE}\r\n" for line in shown) + _CLEAR_BELOW
