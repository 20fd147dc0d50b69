"""Pods that start, run and end while vgpud and the kubelet are killed.

`python -m tests.kubelet.storm --pods 200 --kills 20 --restarts 5` prints the outcome of the pods, and the
time from a pod's end until its memory is free.
"""

import argparse
import asyncio
import itertools
import json
import random
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.demo.node import DemoNode
from tests.e2e.conftest import node_maker
from tests.kubelet.double import AdmissionError, Kubelet, fixed_plugins, kubelet
from vgpud.lease.pages import read_limits
from vgpud.model.quantity import GIB

UNITS = "vgpud.io/memory-gib"
POLICY = """version = 1
[[device]]
mode = "preload"
[kubelet]
check_seconds = 0.5
release_seconds = 1
[[kubelet.resource]]
name = "vgpud.io/memory-gib"
kind = "memory"
"""
SIZES = (1, 2, 3, 7, 20)
STUCK_SECONDS = 120.0  # the longest time until a container starts, including the time in which vgpud is down
FREE_SECONDS = 60.0


@dataclass
class Outcome:
    ran: int = 0
    refused: int = 0  # pods in whose place a new one was made
    retries: int = 0  # container starts that failed and were repeated
    # Seconds from a pod's end until its memory is free, for pods at whose end nothing was killed.
    freed_seconds: list[float] = field(default_factory=list)


@dataclass
class Storm:
    """Runs `pods` pods, `at_once` at a time, during `kills` kills of vgpud and `restarts` of the kubelet."""

    node: DemoNode
    kubelet: Kubelet
    pods: int
    kills: int
    restarts: int
    at_once: int = 8
    seed: int = 21
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._one_admission = asyncio.Lock()  # the kubelet admits one pod at a time
        self._vgpud_serves = asyncio.Event()
        self._vgpud_serves.set()
        self._killed_at = 0.0

    async def run(self) -> Outcome:
        slots = asyncio.Semaphore(self.at_once)

        async def one(number: int) -> None:
            async with slots:
                await self._pod(f"storm/p{number}")

        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(self._kill())
            everyone = [tasks.create_task(one(number)) for number in range(self.pods)]
            await asyncio.gather(*everyone, ending)
        return self.outcome

    async def _kill(self) -> None:
        """Kills vgpud and restarts the kubelet, in random order and at random moments."""
        blows = ["vgpud"] * self.kills + ["kubelet"] * self.restarts
        self._random.shuffle(blows)
        for blow in blows:
            await asyncio.sleep(self._random.uniform(0.2, 1.5))
            self._killed_at = time.monotonic()
            if blow == "kubelet":
                async with self._one_admission:
                    await self.kubelet.restart()
                    self.kubelet.looks_old()
                continue
            self._vgpud_serves.clear()
            await asyncio.to_thread(self.node.kill)
            await asyncio.sleep(self._random.uniform(0.0, 0.5))
            await asyncio.to_thread(self.node.start)
            self._killed_at = time.monotonic()
            self._vgpud_serves.set()

    async def _pod(self, name: str) -> None:
        size, first = self._random.choice(SIZES), self._random.choice((0, 0, *SIZES))
        name, answers = await self._made(name, first, size)
        for container, answer in answers.items():
            (device,) = answer.cdi_devices
            await self._container(f"{name}/{container}", device.name, max(size, first))
        (allocation,) = {answer.cdi_devices[0].name.partition("=")[2] for answer in answers.values()}
        self.outcome.ran += 1
        await self._ended(name, allocation)

    async def _made(self, name: str, first: int, size: int) -> tuple[str, dict[str, Any]]:
        """Makes a new pod in the place of each refused one, as a controller does. Returns the name of the pod
        that is admitted, and the replies for its containers.
        """
        async with asyncio.timeout(STUCK_SECONDS):
            for number in itertools.count():
                pod = f"{name}-{number}"
                await self._scheduled(max(size, first))
                try:
                    return pod, await self._admitted(pod, first, size)
                except AdmissionError:
                    self.kubelet.end(pod)  # an UnexpectedAdmissionError ends the pod
                    self.outcome.refused += 1
                    await asyncio.sleep(0.2)
        raise AssertionError

    async def _scheduled(self, size: int) -> None:
        """Waits until the node has enough free units for the pod. Until then the pod is pending, also while
        vgpud is down.
        """

        def free() -> int:
            endpoint = self.kubelet.endpoints.get(UNITS)
            return 0 if endpoint is None else len(endpoint.healthy - self.kubelet.in_use(UNITS))

        async with asyncio.timeout(STUCK_SECONDS):
            while free() < size:
                await asyncio.sleep(0.05)

    async def _admitted(self, name: str, first: int, size: int) -> dict[str, Any]:
        """Admits an init container with `first` units, if not 0, and the container after it. Returns the
        replies for them by container.
        """
        async with self._one_admission:
            if not first:
                return {"main": await self.kubelet.admit(name, UNITS, size)}
            init = await self.kubelet.admit(name, UNITS, first, container="init", init=True)
            ids = self.kubelet.held[name, "init", UNITS]
            card = next(iter(ids)).partition("::")[0]
            main = await self.kubelet.admit(
                name, UNITS, size, reusable=ids, among=lambda one: one.startswith(card)
            )
            return {"init": init, "main": main}

    async def _container(self, path: str, device: str, gibibytes: int) -> None:
        """Repeats the container's start until it succeeds, and checks its limit while it runs."""
        async with asyncio.timeout(STUCK_SECONDS):
            while (init := await self._start(path, device)) is None:
                self.outcome.retries += 1
                await asyncio.sleep(0.2)
        try:
            for _ in range(self._random.randrange(2, 12)):
                limits = read_limits(self._lease(device))
                held = [one.memory_bytes for one in limits.devices]
                assert held == [gibibytes * GIB], f"{path}: {held} of {gibibytes} GiB"
                await asyncio.sleep(0.1)
        finally:
            init.kill()
            await init.wait()

    async def _start(self, path: str, device: str) -> asyncio.subprocess.Process | None:
        """Starts the container's init. Returns None if its CDI device cannot be resolved, or if the hook
        refuses it.
        """
        try:
            spec = json.loads(self._spec(device).read_text())
        except FileNotFoundError:
            return None
        hooks = spec["devices"][0]["containerEdits"]["hooks"]
        (hook,) = [one for one in hooks if one["hookName"] == "createRuntime"]
        init = await asyncio.create_subprocess_exec("sleep", "600")
        names = ("sandbox-namespace", "sandbox-name", "container-name")
        annotations = {
            f"io.kubernetes.cri.{key}": word for key, word in zip(names, path.split("/"), strict=True)
        }
        state = json.dumps({"pid": init.pid, "bundle": "/b", "annotations": annotations})
        quiet = asyncio.subprocess.DEVNULL
        told = await asyncio.create_subprocess_exec(
            hook["path"], *hook["args"][1:], stdin=asyncio.subprocess.PIPE, stdout=quiet, stderr=quiet
        )
        await told.communicate(state.encode())
        if told.returncode == 0:
            return init
        init.kill()
        await init.wait()
        return None

    async def _ended(self, name: str, allocation: str) -> None:
        began = time.monotonic()
        self.kubelet.end(name)
        async with asyncio.timeout(FREE_SECONDS):
            while self._spec(f"={allocation}").exists():
                await asyncio.sleep(0.01)
        if self._killed_at < began and self._vgpud_serves.is_set():
            self.outcome.freed_seconds.append(time.monotonic() - began)

    def _spec(self, device: str) -> Path:
        return self.node.folder / "cdi" / f"vgpud.io-vgpu_{device.partition('=')[2]}.json"

    def _lease(self, device: str) -> Path:
        return self.node.run_dir / "leases" / device.partition("=")[2]


async def weathered(node: DemoNode, pods: int, kills: int, restarts: int) -> Outcome:
    """Runs a storm and asserts that nothing is left. Returns its outcome."""
    async with kubelet(node.folder / "k") as k:
        await k.healthy(UNITS, 8 * 139)
        k.looks_old()
        outcome = await Storm(node, k, pods, kills, restarts).run()
        async with asyncio.timeout(FREE_SECONDS):
            while (await asyncio.to_thread(node.ctl_json, "ls"))["items"]:
                await asyncio.sleep(0.2)
            while entries(node, "kubelet_holds") or entries(node, "containers"):
                await asyncio.sleep(0.2)
    assert list((node.folder / "cdi").glob("*.json")) == []
    assert list((node.run_dir / "leases").iterdir()) == []
    return outcome


def entries(node: DemoNode, table: str) -> int:
    """Returns the number of rows that are left in a table of vgpud's ledger."""
    with closing(sqlite3.connect(f"file:{node.folder}/state/ledger.db?mode=ro", uri=True)) as ledger:
        return int(ledger.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def stormy_node(make: Any) -> DemoNode:
    node: DemoNode = make("h200x8", POLICY)
    root = node.folder / "k"
    node.environment |= {
        "VGPUD_KUBELET_DIR": str(root),
        "VGPUD_DEVICE_PLUGINS_DIR": str(fixed_plugins(root)),
    }
    node.start()
    return node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, node_maker(Path(folder)) as make:
        found = asyncio.run(weathered(stormy_node(make), asked.pods, asked.kills, asked.restarts))
    cuts = statistics.quantiles(found.freed_seconds, n=100)
    print(f"{found.ran} pods ran, {found.refused} were refused, {found.retries} starts were tried again")
    print(f"free after a pod's end: p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s of {len(found.freed_seconds)}")


if __name__ == "__main__":
    main()
