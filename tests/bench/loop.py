"""Cost of hostile users for others: the longest stop of vgpud's event loop, and an honest user's speed.

Each attack of the security review (tests/bench/attackers.py) goes on for some seconds beside an honest user
of another uid, who allocates and releases; each row has the same figures without an attack. The stop of the
loop is measured in two ways: by the clock, which includes the time of other programs on busy processors, and
by the processor time of the loop's thread. The attackers run at the lowest priority.
"""

import mmap
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.attackers import ATTACKS
from tests.bench.common import Report
from tests.bench.node import POLICY, BenchNode
from tests.bench.watched import STOPS
from tests.demo.node import ROOT

_POLICY = f"{POLICY}\n[runtime]\nusers = true\n"
_SECONDS = 5.0
# The number of attacking users by attack; attacks that are missing here have 4. 32 users make 2048 watches.
_USERS = {"watchers": 32, "listings": 1, "changes": 1}
# attacks of the security review that run at the same time
_TOGETHER = ("idle connections", "unread replies", "slow http", "watchers")
_FILES = 20_000  # descriptors; 4096 connections need three each
_HONEST = """
import os, sys, time
os.setgroups([0]); os.setresgid(0, 0, 0); os.setresuid(5000, 5000, 5000)
from pathlib import Path
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
path, seconds = Path(sys.argv[1]), float(sys.argv[2])
with Client(path) as calls:
    def pair(number):
        asked = pb.AllocateRequest(request_id=f"h{number}", memory_bytes=2 << 20, isolation="quota")
        calls.release(calls.allocate(asked).id)
    for number in range(10):
        pair(f"warm{number}")
    begun, done = time.monotonic(), 0
    while time.monotonic() < begun + seconds:
        pair(done)
        done += 1
    print(done / (time.monotonic() - begun), flush=True)
"""


@dataclass(frozen=True)
class Seen:
    """The loop's longest delay in ms by the clock and by processor time, and the honest user's pairs of
    Allocate and Release per second.
    """

    late_ms: float
    ran_ms: float
    pairs: float


class WatchedNode(BenchNode):
    def __init__(self, folder: Path) -> None:
        super().__init__(_POLICY)
        self._file = folder / "stops"
        self._file.write_bytes(bytes(STOPS.size))
        self.command = (sys.executable, "-m", "tests.bench.watched", str(self._file))
        with self._file.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), STOPS.size)

    def forget_stops(self) -> None:
        STOPS.pack_into(self._page, 0, 0.0, 0.0)

    def stops_ms(self) -> tuple[float, float]:
        late, ran = STOPS.unpack_from(self._page)
        return late * 1e3, ran * 1e3


@contextmanager
def _attack(names: Sequence[str], run_dir: Path) -> Iterator[None]:
    """Runs the attacks during the block. They have begun when the block starts."""
    programs = []
    try:
        for name in names:
            users = _USERS.get(name, 4)
            words = [sys.executable, "-m", "tests.bench.attackers", name, str(run_dir), str(users)]
            pipe = subprocess.PIPE
            one = subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=ROOT, text=True)
            programs.append(one)
            assert one.stdout is not None
            for _ in range(users):
                assert one.stdout.readline() == "stands\n"
        yield
    finally:
        for one in programs:
            one.communicate("")


def _honest(node: WatchedNode) -> float:
    """Pairs of Allocate and Release per second; 0 if the user is not served."""
    words = [sys.executable, "-c", _HONEST, str(node.run_dir / "vgpud.sock"), str(_SECONDS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    if done.returncode != 0:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
        return 0.0
    return float(done.stdout)


def _under(node: WatchedNode, names: Sequence[str]) -> Seen:
    with _attack(names, node.run_dir):
        node.forget_stops()
        pairs = _honest(node)
        return Seen(*node.stops_ms(), pairs)


def run(only: str = "") -> Report:
    report = Report("loop")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, max(hard, _FILES)))
    groups = [*((name,) for name in ATTACKS), _TOGETHER]
    names = [group for group in groups if only in " + ".join(group)]
    with tempfile.TemporaryDirectory(prefix="vgpu-loop-") as folder:
        node = WatchedNode(Path(folder))
        try:
            node.start()
            for group in names:
                before = _under(node, ("nothing",))
                seen = _under(node, group)
                what = " + ".join(group)
                report.value(what, seen.late_ms, "ms late", f"the loop, beside {before.late_ms:.0f} without")
                report.value("", seen.ran_ms, "ms ran", f"its thread at once, {before.ran_ms:.0f} without")
                share = 100 * seen.pairs / before.pairs if before.pairs else 0.0
                note = f"{seen.pairs:.0f} pairs a second, {before.pairs:.0f} without"
                report.value("", share, "% of its speed", f"an honest user: {note}")
        finally:
            node.end()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return report
