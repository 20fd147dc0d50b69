"""Runs vgpud in an event loop that cancels nothing at its end, and prints the tasks that are left.

python -m tests.e2e.ending GRACE_SECONDS
"""

import asyncio
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


if __name__ == "__main__":
    daemon._STOP_SECONDS = float(sys.argv.pop())
    uvloop.run = run
    sys.exit(daemon.main())
