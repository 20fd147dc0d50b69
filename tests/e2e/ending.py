"""Runs vgpud in an event loop that cancels nothing at its end, and prints the tasks that are left.

tests/prepared.py calls its `main`, with the grace period of the calls in seconds as the argument.
"""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from vgpud import daemon

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], **_: Any) -> T:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    outcome = loop.run_until_complete(main)
    sys.stderr.writelines(f"left behind: {task}\n" for task in asyncio.all_tasks(loop))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    return outcome


def main() -> int:
    daemon._STOP_SECONDS = float(sys.argv.pop())
    uvloop.run = run
    code = daemon.main()
    gc.collect()  # work that was not awaited is reported when its object is freed
    return code
