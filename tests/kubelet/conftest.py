"""Fixtures: a keeper in the test's process with its device plugins, and a double of the kubelet that calls
them over real sockets.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clock import until
from tests.kubelet.double import Kubelet
from tests.node.world import FakeGateway, World, world
from vgpud import clock
from vgpud.ledger import RowTable
from vgpud.model.tenancy import Allocation
from vgpud.node.room import Room
from vgpud.serve.kubelet.door import Kubelet as Sockets
from vgpud.serve.kubelet.door import KubeletDoor, Pace

NODE = "node-1"
FAST = Pace(look=0.02, unregistered=0.02, settle=0.005, unwatched=3600.0, retry=0.05, settled=0.0, often=0.02)
MEMORY = """version = 1
[kubelet]
check_seconds = 0.2
release_seconds = 1
[[kubelet.resource]]
name = "vgpud.io/memory-gib"
kind = "memory"
"""


@dataclass
class Turned:
    """Seconds by which a test has advanced vgpud's clock. The clocks of other processes are not advanced."""

    passed: float = 0.0


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Turned:
    ahead, real = Turned(), clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + ahead.passed)
    return ahead


@dataclass
class Node:
    """A node of a cluster: vgpud's keeper with its device plugins, and the kubelet's double."""

    world: World
    kubelet: Kubelet
    folder: Path
    pace: Pace = FAST
    door: KubeletDoor = field(init=False)
    task: asyncio.Task[None] | None = None

    def open(self) -> None:
        room = Room(self.world.keeper, self.world.parts.inventory, self.world.parts.book)
        self.door = KubeletDoor(
            self.world.keeper,
            room,
            Sockets(self.kubelet.root, self.kubelet.plugins, NODE),
            self.world.ledger.rows[RowTable.KUBELET_HOLDS],
            self.world.ledger.rows[RowTable.CONTAINERS],
            lambda: self.world.parts.specs.driver,
            self.pace,
        )
        self.task = asyncio.ensure_future(self.door.run())

    async def close(self) -> None:
        """Stops vgpud's tasks, as its end does."""
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        return tuple(self.world.keeper.book)

    until = staticmethod(until)

    async def policy(self, text: str) -> None:
        (self.folder / "vgpud.toml").write_text(text)
        await self.world.keeper.policies.reload(dry_run=False)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="vgk-"))
    (folder / "state").mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def node_in(
    folder: Path, policy: str = MEMORY, gateway: FakeGateway | None = None, pace: Pace = FAST
) -> AsyncIterator[Node]:
    async with world(folder, gateway) as made:
        kubelet = Kubelet(folder / "kubelet")
        node = Node(made, kubelet, folder, pace)
        await node.policy(policy)
        await kubelet.start()
        node.open()
        try:
            yield node
        finally:
            await node.close()
            await kubelet.stop()


def run(work: Awaitable[None]) -> None:
    asyncio.run(work)  # type: ignore[arg-type]
