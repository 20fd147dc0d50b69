"""`python -m tests.bench.watched FILE`: runs vgpud and writes the stops of its event loop to FILE.

A timer of 2 ms runs on the loop. FILE has two figures, in seconds: the longest delay of the timer (including
the time in which other threads and programs had the processor), and the longest processor time of the loop's
thread between two ticks. Another process sets them to 0 and reads them.
"""

import asyncio
import mmap
import struct
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from vgpud import daemon

BEAT_SECONDS = 0.002
STOPS = struct.Struct("=dd")


class _Heart:
    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._due = self._ran = 0.0

    def start(self) -> None:
        self._due, self._ran = time.perf_counter() + BEAT_SECONDS, time.thread_time()
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        late, ran = STOPS.unpack_from(self._page)
        now = max(late, time.perf_counter() - self._due), max(ran, time.thread_time() - self._ran)
        STOPS.pack_into(self._page, 0, *now)
        self.start()


def main() -> None:
    with Path(sys.argv.pop()).open("r+b") as file:
        heart = _Heart(mmap.mmap(file.fileno(), STOPS.size))
    run = uvloop.run

    async def watched(work: Coroutine[Any, Any, Any]) -> Any:
        heart.start()
        return await work

    uvloop.run = lambda work: run(watched(work))  # type: ignore[assignment, misc]
    daemon.main()


if __name__ == "__main__":
    main()
