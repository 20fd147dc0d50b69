"""Runs the door for remote slices with a clock that a test sets: the file named by VGPU_TEST_CLOCK has its
seconds.

Until the test changes the file, no time passes for the door: no rate limit recovers, and nothing times out.
"""

import asyncio
import os
import selectors
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from vgpud.remote import door

_LOOK_SECONDS = 0.01


class _Selector(selectors.DefaultSelector):
    """Reads the clock before each wait, and waits for a short time only."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._file = Path(os.environ["VGPU_TEST_CLOCK"])

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(_LOOK_SECONDS if timeout is None else min(timeout, _LOOK_SECONDS))
        self.now = float(self._file.read_text())
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._set = _Selector()
        super().__init__(self._set)

    def time(self) -> float:
        return self._set.now


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(main)


def main() -> int:
    uvloop.run = _run  # type: ignore[assignment]
    return door.main()


if __name__ == "__main__":
    sys.exit(main())
