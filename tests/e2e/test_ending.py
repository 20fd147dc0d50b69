"""The daemon stops while calls are under way: it answers them, completes them or leaves them to the next
start. No asyncio task is dropped before its end.
"""

import sys
import threading

import pytest

from tests.demo.node import DemoNode
from tests.e2e.support import ADMIN, GIB, READ, client, eventually
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

CALLERS = 6
ASK = (
    {"isolation": "quota", "memory_bytes": GIB},
    {"isolation": "compute", "memory_bytes": GIB, "share_percent": 10},
    {"isolation": "hardware", "mig_profile": "1g.18gb"},
)
#: Messages of ending.py, asyncio and Python about work that was not awaited.
COMPLAINTS = ("left behind", "destroyed", "never retrieved", "never awaited", "Traceback")


def keep_calling(node: DemoNode, number: int, allocated: threading.Event) -> None:
    """Calls repeatedly until the daemon has ended. Every second caller disconnects before its answer
    arrives.
    """
    seconds = 30 if number % 2 else 0.02
    while True:
        try:
            with client(node, ADMIN, seconds) as calls:
                made = calls.allocate(pb.AllocateRequest(**ASK[number % len(ASK)]))
                allocated.set()
                calls.release(made.id, force=True)
        except VgpuError as error:
            if error.code in (ErrorCode.UNREACHABLE, ErrorCode.STOPPING):
                return


def keep_watching(node: DemoNode, watches: threading.Event) -> None:
    with pytest.raises(VgpuError) as caught, Client(node.run_dir / READ, 300) as calls:
        for _ in calls.watch():
            watches.set()
    assert caught.value.code in (ErrorCode.UNREACHABLE, ErrorCode.STOPPING)


@pytest.mark.parametrize("grace", ["10", "0"], ids=["answered", "cut short"])
def test_no_task_of_the_event_loop_outlives_the_daemon(node: DemoNode, grace: str) -> None:
    node.command = (sys.executable, "-m", "tests.e2e.ending", grace)
    log = ""
    while not log or (grace == "0" and "cancelled_at" not in log):  # the stop may come between two calls
        node.start()
        watches, allocated = threading.Event(), threading.Event()
        threads = [
            *(threading.Thread(target=keep_calling, args=(node, n, allocated)) for n in range(CALLERS)),
            threading.Thread(target=keep_watching, args=(node, watches)),
        ]
        for thread in threads:
            thread.start()
        for begun in (watches, allocated):
            assert begun.wait(300), "calls are under way"
        assert node.stop() == 0
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        log = node.log.read_text()
        assert not any(word in log for word in COMPLAINTS), log


def test_a_loop_that_fails_is_started_again_while_the_daemon_serves(node: DemoNode) -> None:
    code = """
import sys
from vgpud.daemon import main
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.node.tenants.residency import Residency
plain, failed = Residency.run, []
async def fail(self):
    if not failed:
        failed.append(1)
        raise VgpuError(ErrorCode.BAD_POLICY, "told to fail")
    print("runs again", file=sys.stderr, flush=True)
    await plain(self)
Residency.run = fail
sys.exit(main())
"""
    node.command = (sys.executable, "-c", code)
    node.start()
    eventually(lambda: "runs again" in node.log.read_text(), "the loop is started again")
    assert "background_loop_failed_by_bug" in node.log.read_text()
    assert node.stop() == 0
