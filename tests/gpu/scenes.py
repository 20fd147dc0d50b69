"""Shared by the programs of this folder that play scenes: output, checks, and the runner of the scenes."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import end_helpers

#: Holds a pattern of sys.argv[1] MiB in PyTorch. For each line of input it prints whether the pattern is
#: unchanged.
HOLD = """
import json, sys, torch
held = torch.arange(int(sys.argv[1]) << 17, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    whole = held[-1].item() == held.numel() - 1 and held[12345].item() == 12345
    print(json.dumps({"whole": whole}), flush=True)
"""


def say(scene: str, **facts: object) -> None:
    print(json.dumps({"scene": scene, **facts}, default=str), flush=True)


def ask(one: Tenant, words: str = "") -> dict[str, object]:
    """Sends a line to a tenant and returns the answer."""
    assert one.process.stdin is not None
    one.process.stdin.write(f"{words}\n")
    one.process.stdin.flush()
    return one.line()


@contextmanager
def started(node: DemoNode) -> Iterator[DemoNode]:
    """Runs the daemon for the block, and removes the node after it."""
    try:
        node.start()
        yield node
    finally:
        if node.daemon is not None and node.daemon.poll() is None:
            node.stop()
        end_helpers(node)
        node.remove()


def play(scenes: Iterable[tuple[str, Callable[[], None]]]) -> int:
    """Runs the scenes; prints for each its duration, or why it failed. Returns the exit status: 1 if any
    failed."""
    failed = 0
    for name, scene in scenes:
        try:
            began = time.monotonic()
            scene()
            say(name, scene_seconds=round(time.monotonic() - began, 1))
        except Exception as error:
            failed += 1
            say(name, held=False, error=repr(error), trace=traceback.format_exc()[-1500:])
    return min(failed, 1)
