"""Suspends, resumes, moves and kills tenants at random, and kills vgpud at random: no memory is lost.

    .venv/bin/python -m tests.e2e.pool_storm --cycles 1000 [--seed 1] [--cuts 0.04] [--evictable]

With --evictable libvgpu evicts the tenants' memory, and every second suspension is deep; without it the
driver saves the memory.

After each cycle the API, the ledger's file, the leases, the arbiter and NVML agree with the operations that
were made, and every running tenant has its bytes.
"""

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.demo.node import BUILD, POLICY, DemoNode
from tests.e2e.conftest import node_maker
from tests.e2e.cuda import cuda_program
from tests.e2e.support import GIB, MIB, client, eventually
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import ArbiterClient, read_limits, read_usage
from vgpud.model.errors import ErrorCode, VgpuError

# Carries out the command in each line, and then prints a checksum of all its bytes. "fill SEED" writes new
# bytes, "grow MIB SEED" also allocates more (by cuMemCreate if the seed is odd), "sum" changes nothing.
PROGRAM = cuda_program("""
import random, zlib
held = []
class Location(c.Structure): _fields_ = [("type", c.c_int), ("id", c.c_int)]
class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("location", Location), ("win32", c.c_void_p),
                ("flags", c.c_uint64)]
class Access(c.Structure): _fields_ = [("location", Location), ("flags", c.c_int)]
def grow(mib, seed):
    memory, size = c.c_uint64(), mib << 20
    if seed % 2: create(memory, c.c_size_t(size))
    else: call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(size))
    held.append((memory, size))
    fill(seed)
def create(memory, size):
    prop, access = Prop(1, 0, Location(1, 0), None, 0), Access(Location(1, 0), 3)
    handle, none = c.c_uint64(), c.c_uint64(0)
    call("cuMemAddressReserve", c.byref(memory), size, c.c_size_t(0), none, none)
    call("cuMemCreate", c.byref(handle), size, c.byref(prop), none)
    call("cuMemMap", memory, size, c.c_size_t(0), handle, none)
    call("cuMemSetAccess", memory, size, c.byref(access), c.c_size_t(1))
def fill(seed):
    for memory, size in held:
        call("cuMemcpyHtoD_v2", memory, random.Random(seed + size).randbytes(size), c.c_size_t(size))
def total():
    said = 0
    for memory, size in held:
        back = c.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", back, memory, c.c_size_t(size))
        said = zlib.crc32(back.raw, said)
    return said
begin()
for line in sys.stdin:
    verb, *numbers = line.split()
    {"grow": grow, "fill": fill, "sum": lambda: None}[verb](*map(int, numbers))
    print(total(), flush=True)
""")
TENANTS = 4
DEVICES = 4  # four of the node's eight devices: so few that tenants share devices
SLICE_GIB = 40  # three slices fill a device, so a move may find no room
NO_MOVE = (ErrorCode.NO_CAPACITY, ErrorCode.DEVICE_IN_USE)
CUT = (ErrorCode.UNREACHABLE, ErrorCode.STOPPING)


@dataclass
class Tenant:
    """A program under an allocation, with the size and the checksum of the memory that it should have."""

    node: DemoNode
    held: pb.Allocation
    process: subprocess.Popen[str]
    sum: int = 0
    mib: int = 0

    def ask(self, command: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    @property
    def name(self) -> str:
        return self.held.id


@dataclass
class Storm:
    node: DemoNode
    dice: random.Random
    cut_share: float  # share of the operations during which vgpud is killed
    evictable: bool = False
    tenants: list[Tenant] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        with client(self.node) as calls:
            self.uuids = [device.uuid for device in calls.list_devices().devices][:DEVICES]
        self.connection = client(self.node)
        self.arbiter = ArbiterClient(self.node.run_dir / "arbiter" / "control.sock", 300)

    # --- operations

    def fill_up(self) -> None:
        while len(self.tenants) < TENANTS:
            asked = pb.AllocateRequest(
                request_id=f"{self.dice.getrandbits(64):x}", isolation="quota", memory_bytes=SLICE_GIB * GIB
            )
            asked.selector.uuids.extend(self.uuids)
            held = self.connection.allocate(asked)
            edits = dict(held.edits.env) | dict(held.edits.host_env)
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**self.node.environment, **edits},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            tenant = Tenant(self.node, held, process)
            self.grow(tenant)
            self.tenants.append(tenant)

    def grow(self, tenant: Tenant) -> None:
        mib = self.dice.choice((2, 4))  # multiples of the driver's 2 MiB pages
        tenant.sum = tenant.ask(f"grow {mib} {self.dice.getrandbits(30)}")
        tenant.mib += mib

    def cycle(self) -> None:
        tenant = self.dice.choice(self.tenants)
        suspended = self.state(tenant).state == "suspended"
        running = ["suspend"] * 4 + ["move"] * 5 + ["work"] * 2
        if self.evictable:
            running += ["suspend deep"] * 4
        verbs = ["resume"] * 5 + ["move"] * 3 if suspended else running
        verb = self.dice.choice([*verbs, "kill"])
        away = " away" if suspended and verb == "move" else ""
        if verb == "kill":
            self.kill(tenant)
        elif verb == "work":
            self.work(tenant)
        elif self.dice.random() < self.cut_share:
            self.cut(self.order(verb, tenant))
            verb = f"{verb}{away}, vgpud killed"
        else:
            try:
                self.order(verb, tenant)()
            except VgpuError as error:
                if error.code not in NO_MOVE:
                    raise
                verb = f"{verb}{away}, refused"
            else:
                verb = f"{verb}{away}"
        self.done[verb] += 1
        self.fill_up()
        self.check()

    def state(self, tenant: Tenant) -> pb.Allocation:
        return self.connection.get_allocation(tenant.name)

    def order(self, verb: str, tenant: Tenant) -> Callable[[], object]:
        if verb == "move":
            target = self.dice.choice(self.uuids)
            return lambda: self.connection.move(tenant.name, [target])
        if verb.startswith("suspend"):
            return lambda: self.connection.suspend(tenant.name, verb.endswith("deep"))
        return lambda: getattr(self.connection, verb)(tenant.name)

    def work(self, tenant: Tenant) -> None:
        if tenant.mib < 12:
            self.grow(tenant)
        else:
            tenant.sum = tenant.ask(f"fill {self.dice.getrandbits(30)}")

    def kill(self, tenant: Tenant) -> None:
        tenant.process.kill()
        tenant.process.wait()
        self.tenants.remove(tenant)
        self.is_released(tenant)

    def is_released(self, tenant: Tenant) -> None:
        """Releases the tenant's allocation as soon as vgpud knows that its processes have ended."""
        eventually(lambda: not self.alive(tenant), "its processes are known to be gone")

    def alive(self, tenant: Tenant) -> bool:
        try:
            self.connection.release(tenant.name)
        except VgpuError as error:
            assert error.code in (ErrorCode.TENANT_ALIVE, ErrorCode.ALLOCATION_BUSY), error
            return True
        return False

    def cut(self, order: Callable[[], object]) -> None:
        """Begins an operation, and kills vgpud at a random moment of the next 60 ms."""

        def try_it() -> None:
            try:
                order()
            except VgpuError as error:
                assert error.code in (*CUT, *NO_MOVE), error

        caller = threading.Thread(target=try_it)
        caller.start()
        time.sleep(self.dice.random() * 0.06)
        self.node.kill()
        caller.join()
        self.connection.close()
        self.node.start(timeout_seconds=300)
        self.connection = client(self.node)

    # --- checks after each cycle

    def check(self) -> None:
        held = {one.id: one for one in self.connection.list_allocations().allocations}
        assert held.keys() == {tenant.name for tenant in self.tenants}
        self._check_ledger(held)
        expected: Counter[str] = Counter()
        for tenant in self.tenants:
            one = held[tenant.name]
            assert one.state in ("active", "suspended"), one
            (part,) = one.slices
            assert part.device_uuid in self.uuids
            folder = self.node.run_dir / "leases" / one.id
            assert [d.uuid for d in read_limits(folder).devices] == [part.device_uuid]
            assert self.arbiter.list(one.id) == (tenant.process.pid,)
            if one.state == "active":
                assert tenant.ask("sum") == tenant.sum, f"{one.id} has lost its bytes"
                expected[part.device_uuid] += SLICE_GIB * GIB
            else:
                expected[part.device_uuid] += one.stays_bytes
        for device in self.connection.list_devices().devices:
            assert device.memory_allocated_bytes == expected[device.uuid], device
        self._check_node(held)

    def _check_ledger(self, held: dict[str, pb.Allocation]) -> None:
        path = next((self.node.folder / "state").glob("*.db"))
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            rows = file.execute("SELECT id, state, slices FROM allocations").fetchall()
        written = {name: (state, [s["device_uuid"] for s in json.loads(text)]) for name, state, text in rows}
        shown = {one.id: (one.state, [s.device_uuid for s in one.slices]) for one in held.values()}
        assert written == shown
        assert not any("other_uuid" in text for _, _, text in rows)

    def _check_node(self, held: dict[str, pb.Allocation]) -> None:
        """Compares the state and the device of each process with the simulated driver's, and its memory with
        the lease's figure. Asserts that no memory is in use on devices outside of the test.
        """
        simctl = BUILD / "sim" / "bin" / "vgpu-simctl"
        state = self.node.environment["VGPU_SIM_STATE"]
        shown: dict[str, Any] = json.loads(subprocess.check_output([simctl, state, "dump"]))
        processes = {process["pid"]: process for process in shown["processes"]}
        for tenant in self.tenants:
            one, process = held[tenant.name], processes[tenant.process.pid]
            away = one.state == "suspended" and not one.stays_bytes
            assert process["state"] == ("checkpointed" if away else "running"), (one, process)
            if away:
                continue
            (use,) = [use for use in process["uses"] if use["contexts"]]
            assert shown["devices"][use["device"]]["uuid"] == one.slices[0].device_uuid
            meter = read_usage(self.node.run_dir / "leases" / one.id).device(0)
            assert meter.used_bytes == tenant.mib * MIB
        used = sum(device["memory_used"] > 0 for device in shown["devices"][DEVICES:])
        assert used == 0


def run(
    folder: Path,
    cycles: int,
    seed: int,
    cut_share: float = 0.04,
    say: Callable[[str], None] = lambda _: None,
    evictable: bool = False,
) -> Storm:
    """Runs the storm on a new simulated node of eight devices."""
    rules = "[device.preload]\nevictable = true\n" if evictable else ""
    policy = f'{POLICY}{rules}\n[pool]\nhost_memory_reserve = "1MiB"\n'
    with node_maker(folder) as make:
        node = make(policy=policy)
        node.start()
        storm = Storm(node, random.Random(seed), cut_share, evictable)
        try:
            storm.fill_up()
            for number in range(cycles):
                storm.cycle()
                if number % 50 == 49:
                    say(f"{number + 1} cycles: {dict(storm.done)}")
        finally:
            for tenant in storm.tenants:
                tenant.process.kill()
                tenant.process.wait()
        for tenant in tuple(storm.tenants):
            storm.is_released(tenant)
        assert not storm.connection.list_allocations().allocations
        storm.connection.close()
        node.stop()
    return storm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=float, default=0.04, help="share of calls in which vgpud is killed")
    parser.add_argument("--evictable", action="store_true", help="libvgpu evicts the tenants' memory")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seed, cuts = arguments.seed, arguments.cuts
        say = partial(print, flush=True)
        storm = run(Path(folder), arguments.cycles, seed, cuts, say, arguments.evictable)
    seconds = time.monotonic() - began
    print(f"{arguments.cycles} cycles in {seconds:.0f} s, nothing lost: {dict(storm.done.most_common())}")


if __name__ == "__main__":
    main()
