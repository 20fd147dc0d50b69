"""Measures the time that vgpu-runtime adds to the start of a container: `python -m tests.runtime.cost
[--rounds 100]`.

Each round creates one container with runc alone, one through vgpu-runtime that asks for nothing, and one that
asks for memory. It times `create`, after which an engine starts the container. Needs root.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.conftest import node_maker
from tests.runtime.bundles import Runc, config
from tests.runtime.rootfs import make_rootfs

ASKS = {"vgpud.io/memory": "1GiB", "vgpud.io/isolation": "quota"}


def create(runc: Runc, command: list[str], name: str, asks: dict[str, str], rootfs: Path) -> float:
    """Milliseconds of one `create`."""
    folder = runc.bundle(name, config(rootfs, "sleep", "60", asks=asks))
    with (folder / "output").open("w") as output:
        began = time.perf_counter()
        subprocess.run(
            [*command, "create", "--bundle", str(folder), name],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        took = time.perf_counter() - began
    runc.delete(name)
    return took * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="time the creation of containers")
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="vgpud-cost") as text, node_maker(Path(text)) as make:
        folder = Path(text)
        node = make("h200x8")
        node.start()
        rootfs = make_rootfs(folder / "fs")
        (folder / "runc").mkdir()
        runc = Runc(folder / "runc", node.run_dir)
        plain = ["runc", "--root", str(runc.root / "state")]
        ways: dict[str, tuple[list[str], dict[str, str]]] = {
            "runc": (plain, {}),
            "nothing asked": (runc.command(), {}),
            "memory asked": (runc.command(), ASKS),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, (command, asks) in ways.items():
                times[way].append(create(runc, command, f"c{number}{way[:3]}", asks, rootfs))
    base = statistics.median(times["runc"])
    for way, found in times.items():
        found.sort()
        median, late = statistics.median(found), found[len(found) * 95 // 100]
        print(f"{way:14} median {median:6.1f} ms ({median - base:+5.1f})  95th percentile {late:6.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
