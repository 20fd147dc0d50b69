"""`python -m tests.bench [NAME...]`: prints tables on standard output and writes JSON to build/bench."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import (
    arbiter,
    exposition,
    grpc_bench,
    idle_replay,
    ledger,
    loop,
    memory,
    mig_packing,
    operate,
    pool_replay,
    shares,
    simulator,
    soak,
)
from tests.bench.common import HEAD, Report
from tests.demo.node import BUILD

BENCHES: dict[str, Callable[[argparse.Namespace], Report]] = {
    "ledger": lambda arguments: ledger.run(arguments.calls),
    "mig-packing": lambda arguments: mig_packing.run(),
    "idle-replay": lambda arguments: idle_replay.run(),
    "pool-replay": lambda arguments: pool_replay.run(),
    "shares": lambda arguments: shares.run(),
    "arbiter": lambda arguments: arbiter.run(arguments.attack),
    "simulator": lambda arguments: simulator.run(arguments.crowd_seconds),
    "exposition": lambda arguments: exposition.run(),
    "operate": lambda arguments: operate.run(),
    "soak": lambda arguments: soak.run(arguments.cycles),
    "loop": lambda arguments: loop.run(arguments.attack),
    "memory": lambda arguments: memory.run(arguments.allocations),
    "grpc": lambda arguments: grpc_bench.run(arguments.calls, arguments.idle_seconds),
}
_NEED_A_NODE = {"grpc", "loop", "memory", "operate", "soak"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench", description="measure, compare, do not judge")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all if none is given"
    )
    parser.add_argument("--calls", type=int, default=1000, help="for one client; four times as many for many")
    parser.add_argument("--idle-seconds", type=float, default=60, help="to watch an idle daemon")
    parser.add_argument("--cycles", type=int, default=2000, help="of the soak; a day's worth is 200000")
    parser.add_argument("--allocations", type=int, default=4000, help="of the memory; 8192 have room")
    parser.add_argument(
        "--crowd-seconds", type=float, default=60, help="of the simulator: processes are killed"
    )
    parser.add_argument(
        "--attack", default="", help="of arbiter and loop: those whose name has this in it alone"
    )
    parser.add_argument(
        "--real", action="store_true", help="on this machine's GPUs, not on the simulated node"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        parser.error(f"no bench {unknown[0]!r}: there are {', '.join(BENCHES)}")
    arguments.names = arguments.names or list(BENCHES)
    return arguments


def on_simulated_node() -> int:
    """Runs the benchmark again, on a simulated node of eight H200."""
    with tempfile.TemporaryDirectory(prefix="vgpu-sim-") as folder:
        inside = [str(BUILD / "bin" / "vgpu-sim"), "run", "--profile", "h200x8", "--state", f"{folder}/node"]
        return subprocess.call([*inside, "--", sys.executable, "-m", "tests.bench", *sys.argv[1:]])


def main() -> int:
    arguments = parse()
    simulated = "VGPU_SIM_STATE" in os.environ
    if _NEED_A_NODE & set(arguments.names) and not arguments.real and not simulated:
        return on_simulated_node()
    written: list[Path] = []
    for name in arguments.names:
        print(f"\n== {name}\n{HEAD}")
        written.append(BENCHES[name](arguments).write())
    print("\n" + "\n".join(f"wrote {os.path.relpath(path)}" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
