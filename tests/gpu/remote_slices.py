"""Remote slices on a real GPU, with a real engine: limits, shares, and rates beside a local tenant's.

    python -m tests.gpu.remote_slices --server PROGRAM --library FOLDER --out FILE

Programs of PyTorch run as local tenants, with the engine alone, and as remote ones, by the loopback address,
as it is and with a time that a relay (delay.c) adds to each round trip. The engine is not part of this tree.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.demo.node import POLICY, ROOT, DemoNode
from tests.remote.node import RemoteNode
from vgpud.remote.engine import ENGINES

WORK = r"""
import json, sys, time
import torch
kind, seconds = sys.argv[1], float(sys.argv[2])
device = torch.device("cuda")
if kind == "memory":
    held = []
    try:
        while True:
            held.append(torch.empty(256 << 20, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        pass
    print(json.dumps({"rate": len(held) * 256}))
    sys.exit()
if kind == "train":
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    model = model.to(device)
    adam = torch.optim.Adam(model.parameters())
    data = torch.randn(1024, 2048, device=device)
    def step():
        adam.zero_grad()
        model(data).square().mean().backward()
        adam.step()
elif kind == "decode":
    weights = [torch.randn(4096, 4096, device=device, dtype=torch.float32) / 64 for _ in range(16)]
    def step():
        x = torch.ones(1, 4096, device=device, dtype=torch.float32)
        for w in weights:
            x = torch.relu(x @ w)
        return x.float().argmax().item()
else:
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    def step():
        for _ in range(4):
            a @ a
        torch.cuda.synchronize()
for _ in range(3):
    step()
torch.cuda.synchronize()
print("ready", flush=True)
begun, ends = time.monotonic(), []
while not ends or ends[-1] - begun < seconds:
    step()
    ends.append(time.monotonic())
torch.cuda.synchronize()
rate = len(ends) / (time.monotonic() - begun)
print(json.dumps({"rate": rate, "begun": begun, "ends": ends if kind == "spin" else []}))
"""


class Delay:
    """A relay to a port of the loopback address that adds a time to each round trip."""

    def __init__(self, program: Path, port: int, added_seconds: float) -> None:
        each = added_seconds / 2
        self.added_seconds = _added(program, each)
        for _ in range(3):  # the relay itself takes time
            each = max(0.0, each - (self.added_seconds - added_seconds) / 2)
            self.added_seconds = _added(program, each)
        self._process, self.port = _relay(program, port, each)

    def close(self) -> None:
        _end(self._process)


def _relay(program: Path, port: int, each_seconds: float) -> "tuple[subprocess.Popen[str], int]":
    words = [str(program), str(port), str(int(each_seconds * 1e9))]
    made = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    return made, int(made.stdout.readline())


def _end(relay: "subprocess.Popen[str]") -> None:
    relay.kill()
    relay.communicate()


def _added(program: Path, each_seconds: float) -> float:
    """The time that a relay adds to the round trip of a byte, as the difference of medians of 200 round
    trips.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        relay, late = _relay(program, port, each_seconds)
        added = _round_trip(late) - _round_trip(port)
        _end(relay)
    return added


def _echo(listener: socket.socket) -> None:
    for _ in range(2):
        made, _ = listener.accept()
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with made:
            while data := made.recv(1):
                made.sendall(data)


def _round_trip(port: int) -> float:
    times = []
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(200):
            begun = time.perf_counter()
            made.sendall(b"x")
            made.recv(1)
            times.append(time.perf_counter() - begun)
    return median(times)


_WHOLE = ("--memory", "16GiB")


class Bench:
    def __init__(self, remote: RemoteNode, library: str, seconds: float) -> None:
        self._remote, self._library, self._seconds = remote, library, seconds
        self.token = remote.grant()
        self.rows: list[dict[str, Any]] = []

    def start(
        self, kind: str, where: str, *options: str, port: int = 0, seconds: float = 0
    ) -> "subprocess.Popen[str]":
        work = [sys.executable, "-c", WORK, kind, str(seconds or self._seconds)]
        told = {**self._remote.node.environment, "VGPU_REMOTE_TOKEN": self.token}
        if where == "native":
            words = work
        elif where == "engine":
            words = work
            told |= ENGINES["lupine"].client_environment(ENGINES["lupine"].port, self._library, told)
        elif where == "local":
            words = [sys.executable, "-m", "vgpud.ctl", "run", *(options or _WHOLE), "--", *work]
        else:
            place = f"127.0.0.1:{port or self._remote.port}"
            words = [sys.executable, "-m", "vgpud.ctl", "remote", "run", place]
            words += ["--library", self._library, *(options or _WHOLE), "--", *work]
        return subprocess.Popen(
            words, env=told, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def end(self, case: str, process: "subprocess.Popen[str]") -> dict[str, Any]:
        try:
            said, errors = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
            errors += "\nno end within 90 s"
        lines = [line for line in said.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1]) if lines else {"rate": None}
        row = {"case": case, "rate": found["rate"], "code": process.returncode}
        if not lines:
            row["error"] = errors[-1500:]
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return found

    def run(self, case: str, kind: str, where: str, *options: str, **more: Any) -> dict[str, Any]:
        return self.end(case, self.start(kind, where, *options, **more))

    def shares(self) -> None:
        """Measures a remote slice of 25 % beside a local one of 75 %, while both run, in percent of what each
        has alone.
        """
        alone = {where: self.run(f"spin, {where}", "spin", where)["rate"] for where in ("local", "remote")}
        for number in range(2):
            slices = {"local": "75", "remote": "25"}
            started = {
                where: self.start("spin", where, "--memory", "8GiB", "--cores", cores, seconds=20)
                for where, cores in slices.items()
            }
            found = {
                where: self.end(f"spin, {where} of {slices[where]}", one) for where, one in started.items()
            }
            if any("ends" not in one for one in found.values()):
                return
            begun = max(one["begun"] for one in found.values())
            ended = min(one["ends"][-1] for one in found.values())
            for where, one in found.items():
                inside = [end for end in one["ends"] if begun < end <= ended]
                rate = (len(inside) - 1) / (inside[-1] - inside[0])
                percent = 100 * rate / alone[where]
                row = {"case": f"share {number}, {where}", "percent": percent, "seconds": ended - begun}
                self.rows.append(row)
                print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, type=Path)
    parser.add_argument("--library", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    node = DemoNode(POLICY, os.environ)
    remote = RemoteNode(node, server=arguments.server)
    bench = Bench(remote, arguments.library, arguments.seconds)
    relay = node.folder / "delay"
    subprocess.run(["cc", "-O2", str(Path(__file__).with_name("delay.c")), "-o", str(relay)], check=True)
    alone = subprocess.Popen(
        [str(arguments.server)], env={**os.environ, **ENGINES["lupine"].server_environment()}
    )
    try:
        bench.run("memory, remote, 4 GiB (MiB)", "memory", "remote", "--memory", "4GiB")
        bench.shares()
        for kind in ("decode", "train"):
            for where in ("local", "engine", "remote"):
                bench.run(f"{kind}, {where}", kind, where)
            for milliseconds in (0.1, 0.5, 2.0):
                late = Delay(relay, remote.port, milliseconds / 1000)
                case = f"{kind}, remote, {late.added_seconds * 1000:.3f} ms"
                bench.run(case, kind, "remote", port=late.port)
                late.close()
        for where in ("engine", "remote"):
            bench.run(f"bfloat16, {where}", "bfloat16", where)
        bench.run("spin, engine", "spin", "engine")
    finally:
        alone.kill()
        arguments.out.write_text(
            json.dumps({"rows": bench.rows, "log": remote.log.read_text()[-4000:]}, indent=1)
        )
        remote.close()
        node.stop()
        node.remove()


if __name__ == "__main__":
    main()
