"""Pods of a real cluster that start, run and end while vgpud and the kubelet are killed.

`python -m tests.cluster.storm --kubernetes FOLDER --pods 200 --kills 20 --restarts 5` prints the outcome of
the pods, and the time from the end of a pod's program, and from that of the pod, until its memory is free.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.conftest import running
from tests.cluster.pods import MEMORY, Pods, container, pod
from tests.cluster.test_plugin import UNITS, mib, served
from tests.e2e.support import client, eventually
from tests.kubelet.storm import SIZES
from tests.runtime.conftest import made_rootfs

PROGRAM = "nvidia-smi --query-gpu=memory.total --format=csv,noheader; sleep {seconds:.1f}; echo end"
# The kubelet's log line for the end of a pod. From then on PodResources does not list the pod.
POD_ENDED = re.compile(
    r'^I(\d{4} \S+) .*"Pod termination stopped all running containers" pod="default/(\w+)"', re.M
)


@dataclass
class Storm:
    """Runs `count` pods, `at_once` at a time, during `kills` kills of vgpud and `restarts` of the kubelet."""

    pods: Pods
    count: int
    kills: int
    restarts: int
    at_once: int = 8
    refused: int = 0  # the number of pods that were refused and made again
    unread: int = 0  # the number of pods whose log the kubelet has removed, and that were made again
    # the time of the last line of each pod's program
    ended: dict[str, datetime] = field(default_factory=dict)
    blows: list[tuple[float, float]] = field(default_factory=list)  # begin and end of kills, in seconds

    def __post_init__(self) -> None:
        self._random = random.Random(21)
        self._sizes: dict[str, int] = {}
        self._numbers = itertools.count()

    def run(self) -> None:
        killing = threading.Thread(target=self._kill)
        killing.start()
        while len(self.ended) < self.count:
            over = [name for name, status in self._listed() if self._is_over(name, status)]
            if over:
                self.pods.cluster.kubectl("delete", "pod", *over, "--wait=false")
            missing = self.count - len(self.ended) - len(self._sizes)
            new = [self._new() for _ in range(min(missing, self.at_once - len(self._sizes)))]
            if new:
                self.pods.create(*new)
            time.sleep(0.1)
        killing.join()

    def _new(self) -> dict[str, Any]:
        name = f"p{next(self._numbers)}"
        self._sizes[name] = size = self._random.choice(SIZES)
        command = ["/bin/sh", "-c", PROGRAM.format(seconds=self._random.uniform(0.1, 2.0))]
        return pod(name, container("main", {MEMORY: size}, command=command))

    def _listed(self) -> Iterator[tuple[str, Any]]:
        for one in self.pods.cluster.get("pods"):
            if one["metadata"]["name"] in self._sizes:
                yield one["metadata"]["name"], one["status"]

    def _is_over(self, name: str, status: Any) -> bool:
        """Returns whether the pod has ended, and records its outcome. A failed pod has not run its program,
        and another pod takes its place.
        """
        if status["phase"] not in ("Succeeded", "Failed"):
            return False
        size = self._sizes.pop(name)
        if status["phase"] == "Failed":
            self.refused += 1
            return True
        lines = self._log(name)
        if not lines:
            self.unread += 1
            return True
        *shown, last = lines
        found = min(int(line.split()[3]) for line in shown)
        assert found == mib(size), f"{name}: {found} MiB of {mib(size)}"
        self.ended[name] = datetime.fromisoformat(last.split()[0].replace("Z", "+00:00"))
        return True

    def _log(self, name: str) -> list[str]:
        logs = list((self.pods.cluster.folder / "pods").glob(f"default_{name}_*/main/*.log"))
        return logs[-1].read_text().splitlines() if logs else []

    def _kill(self) -> None:
        words = ["vgpud"] * self.kills + ["kubelet"] * self.restarts
        self._random.shuffle(words)
        for word in words:
            time.sleep(self._random.uniform(1.0, 4.0))
            program = self.pods.cluster.node if word == "vgpud" else self.pods.cluster.kubelet
            began = time.time()
            program.kill()
            program.start()
            self.blows.append((began, time.time()))

    def freed_seconds(self) -> Iterator[tuple[float, float]]:
        """For each pod around whose end nothing was killed: the seconds from the end of its program, and from
        the end of the pod, until its memory is free.
        """
        with client(self.pods.cluster.node) as calls:
            events = [e for e in calls.list_events(1000).events if e.kind == "allocation_released"]
        ends = self._ends()
        for name, end in self.ended.items():
            times = [e.unix_ns / 1e9 for e in events if f"default/{name}/main" in e.sentence]
            quiet = all(
                blow[1] + 10 < end.timestamp() or end.timestamp() + 5 < blow[0] for blow in self.blows
            )
            if quiet and times:
                yield times[-1] - end.timestamp(), times[-1] - ends[name]

    def _ends(self) -> dict[str, float]:
        """The times at which the kubelet ended the pods, according to its log."""
        year = datetime.now().astimezone().year
        return {
            name: datetime.strptime(f"{year}{text}", "%Y%m%d %H:%M:%S.%f").astimezone().timestamp()
            for text, name in reversed(POD_ENDED.findall(self.pods.cluster.kubelet.log.read_text()))
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubernetes", type=Path, required=True)
    parser.add_argument("--containerd", default="2")
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "c").mkdir()
        rootfs = made_rootfs(folder / "fs")
        with running(asked.containerd, asked.kubernetes.resolve(), rootfs, folder / "c") as pods:
            node = pods.cluster.node
            (node.folder / "etc" / "vgpud.toml").write_text(UNITS.replace('"auto"', '"preload"'))
            node.start()
            served(pods, 8 * 130)
            storm = Storm(pods, asked.pods, asked.kills, asked.restarts)
            storm.run()
            eventually(lambda: not pods.held(), "all memory is free")
            pods.clear()
            freed = list(storm.freed_seconds())
            left = [*(node.folder / "cdi").glob("*.json"), *(node.run_dir / "leases").iterdir()]
            node.stop()
    print(
        json.dumps(
            {"ran": len(storm.ended), "refused": storm.refused, "unread": storm.unread, "left": len(left)}
        )
    )
    for since, seconds in zip(("program", "pod"), zip(*freed, strict=True), strict=True):
        cuts = statistics.quantiles(seconds, n=100)
        print(f"free after the {since}'s end: p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s of {len(freed)}")


if __name__ == "__main__":
    main()
