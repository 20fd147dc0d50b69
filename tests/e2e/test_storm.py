"""Twelve clients use every mode while vgpud is killed repeatedly: no allocation is lost, and nothing is
leaked.

VGPUD_STORM_KILLS sets its length, VGPUD_STORM_SEED its seed.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.demo.node import DemoNode
from tests.e2e.support import GIB, client, eventually, helper_pids, states
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

KILLS = int(os.environ.get("VGPUD_STORM_KILLS", "3"))
SEED = int(os.environ.get("VGPUD_STORM_SEED", "1"))
CLIENTS = 12
ASK: dict[str, dict[str, Any]] = {
    "preload": {"isolation": "quota", "memory_bytes": 2 * GIB},
    "mps": {"isolation": "compute", "memory_bytes": 2 * GIB, "share_percent": 10},
    "mig": {"isolation": "hardware", "mig_profile": "1g.18gb"},
    "exclusive": {"isolation": "device"},
}
AGAIN = {ErrorCode.UNREACHABLE, ErrorCode.STOPPING, ErrorCode.DEADLINE, ErrorCode.ALLOCATION_BUSY}
T = TypeVar("T")
NO_ROOM = {ErrorCode.NO_CAPACITY, ErrorCode.DENIED_BY_POLICY}


@dataclass
class Tenant:
    """A client that records the allocations that it holds. If a kill of vgpud interrupts a call, the client
    repeats it until it gets an answer.
    """

    node: DemoNode
    number: int
    calm: threading.Event
    held: dict[str, pb.Allocation] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def live(self) -> None:
        dice = random.Random(SEED * 1000 + self.number)
        made = 0
        try:
            while not self.calm.is_set():
                verb = dice.choice(("allocate", "allocate", "release", "resize"))
                if verb == "allocate" and len(self.held) < 3:
                    made += 1
                    self.allocate(f"t{self.number}-{made}", dice.choice(list(ASK)))
                elif self.held and verb == "release":
                    self.release(dice.choice(list(self.held)))
                elif self.held and verb == "resize":
                    self.resize(dice.choice(list(self.held)), dice.randint(1, 4))
        except Exception as error:
            # unexpected errors go to the list `wrong`, which the test's main thread asserts to be empty
            self.wrong.append(f"{type(error).__name__}: {error}")

    def allocate(self, name: str, mode: str) -> None:
        def call(calls: Client) -> pb.Allocation:
            return calls.allocate(pb.AllocateRequest(request_id=name, **ASK[mode]))

        try:
            first = self.insist(call)
        except VgpuError as error:
            if error.code not in NO_ROOM:
                self.wrong.append(f"allocate {mode}: {error}")
            self.done[f"{mode} refused"] += 1
            return
        again = self.insist(call)
        if again.id != first.id:
            self.wrong.append(f"{name} was {first.id} and is {again.id}")
        self.held[name] = again
        self.done[mode] += 1

    def release(self, name: str) -> None:
        try:
            self.insist(lambda calls: calls.release(self.held[name].id))
        except VgpuError as error:
            # the killed daemon had already released the allocation
            if error.code is not ErrorCode.NO_SUCH_ALLOCATION:
                self.wrong.append(f"release {name}: {error}")
        del self.held[name]
        self.done["release"] += 1

    def resize(self, name: str, gib: int) -> None:
        if self.held[name].slices[0].mode != "preload":
            return
        try:
            self.held[name] = self.insist(
                lambda calls: calls.resize(self.held[name].id, memory_bytes=gib * GIB)
            )
            self.done["resize"] += 1
        except VgpuError as error:
            self.wrong.append(f"resize {name}: {error}")

    def insist(self, call: Callable[[Client], T]) -> T:
        while True:
            try:
                with client(self.node) as calls:
                    return call(calls)
            except VgpuError as error:
                if error.code not in AGAIN:
                    raise
                time.sleep(0.02)


def test_no_allocation_is_lost_in_a_storm_of_clients_faults_and_kills(node: DemoNode) -> None:
    node.start()
    calm = threading.Event()
    tenants = [Tenant(node, number, calm) for number in range(CLIENTS)]
    threads = [
        threading.Thread(target=tenant.live, name=f"tenant{tenant.number}", daemon=True) for tenant in tenants
    ]
    for thread in threads:
        thread.start()
    dice = random.Random(SEED)

    def calls_done() -> int:
        return sum(tenant.done.total() for tenant in tenants)

    def wait_for_calls(count: int) -> None:
        eventually(lambda: calls_done() >= count, "calls are answered")

    try:
        for _ in range(KILLS):
            wait_for_calls(calls_done() + dice.randint(1, 60))
            node.kill()
            node.start()
    finally:
        calm.set()
        for thread in threads:
            thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a call is never answered"
    print(f"{KILLS} kills, {sum((t.done for t in tenants), Counter())}")
    assert [wrong for tenant in tenants for wrong in tenant.wrong] == []
    held = {a.id: a for tenant in tenants for a in tenant.held.values()}
    eventually(lambda: states(node) == dict.fromkeys(held, "active"), "ledger and tenants agree")
    agrees(node, held)
    node.kill()
    node.start()
    assert states(node) == dict.fromkeys(held, "active")
    agrees(node, held)
    for tenant in tenants:
        for name in tuple(tenant.held):
            tenant.release(name)
    agrees(node, {})
    assert [wrong for tenant in tenants for wrong in tenant.wrong] == []
    assert node.stop() == 0
    assert helper_pids(node) == {}
    assert "Traceback" not in node.log.read_text()


def agrees(node: DemoNode, held: dict[str, pb.Allocation]) -> None:
    """Asserts that each place with parts of allocations has the parts of those in `held`, and no others."""
    slices = [(a.id, part) for a in held.values() for part in a.slices]
    with client(node) as calls:
        devices = calls.list_devices().devices
        shown = {a.id: a for a in calls.list_allocations().allocations}
    assert {i: a.slices[0].memory_bytes for i, a in shown.items()} == {
        i: a.slices[0].memory_bytes for i, a in held.items()
    }
    preload = {name for name, part in slices if part.mode == "preload"}
    assert names(node.run_dir / "leases") == preload
    specs = {name.removeprefix("vgpud.io-vgpu_").removesuffix(".json") for name in names(node.folder / "cdi")}
    assert specs == set(held)
    with_mps = {part.device_uuid for _, part in slices if part.mode == "mps"}
    assert set(helper_pids(node, "vgpud-mps@")) == {f"vgpud-mps@{uuid}" for uuid in with_mps}
    assert names(node.run_dir / "mps" / "t") == {name for name, part in slices if part.mode == "mps"}
    instances = Counter(part.device_uuid for _, part in slices if part.mode == "mig")
    for device in devices:
        mine = [part for _, part in slices if part.device_uuid == device.uuid]
        assert len(device.mig.instances) == instances[device.uuid], device.uuid
        assert device.mig.current == bool(instances[device.uuid]), device.uuid
        assert device.allocation_count == len(mine)
        assert device.memory_allocated_bytes == sum(part.memory_bytes for part in mine)


def names(folder: Path) -> set[str]:
    """The names of all files, including hidden ones, because unfinished files are leaks as well."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
