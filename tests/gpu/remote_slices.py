"""Remote slices on a real GPU, with a real engine: limits, shares, and rates beside a local tenant's.

    python -m tests.gpu.remote_slices --server PROGRAM --library FOLDER --out FILE

Programs of PyTorch run as local tenants and as remote ones, by the loopback address, as it is and with a
delay that a relay of this program adds to each direction. The engine is not part of this tree.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.demo.node import POLICY, ROOT, DemoNode
from tests.remote.node import RemoteNode

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
    a = torch.randn(8192, 8192, device=device, dtype=torch.float32)
    def step():
        for _ in range(4):
            a @ a
        torch.cuda.synchronize()
for _ in range(3):
    step()
torch.cuda.synchronize()
print("ready", flush=True)
begun, count = time.monotonic(), 0
while time.monotonic() - begun < seconds:
    step()
    count += 1
torch.cuda.synchronize()
print(json.dumps({"rate": count / (time.monotonic() - begun)}))
"""


class Delay:
    """A relay on a loopback port that delays each direction."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(port, seconds)), daemon=True).start()
        self._ready.wait()

    async def _serve(self, port: int, seconds: float) -> None:
        async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(
                _late(reader, far_writer, seconds), _late(far_reader, writer, seconds), return_exceptions=True
            )

        server = await asyncio.start_server(arrived, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()


async def _late(source: asyncio.StreamReader, target: asyncio.StreamWriter, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await source.read(1 << 18):
        loop.call_later(seconds, target.write, data)
        await target.drain()
    loop.call_later(seconds, target.close)


class Bench:
    def __init__(self, remote: RemoteNode, library: str, seconds: float) -> None:
        self._remote, self._library, self._seconds = remote, library, seconds
        self.token = remote.grant()
        self.rows: list[dict[str, Any]] = []

    def start(
        self, kind: str, where: str, *options: str, port: int = 0, seconds: float = 0
    ) -> "subprocess.Popen[str]":
        work = [sys.executable, "-c", WORK, kind, str(seconds or self._seconds)]
        if where == "native":
            words = work
        elif where == "local":
            words = [sys.executable, "-m", "vgpud.ctl", "run", *options, "--", *work]
        else:
            place = f"127.0.0.1:{port or self._remote.port}"
            words = [sys.executable, "-m", "vgpud.ctl", "remote", "run", place]
            words += ["--library", self._library, *options, "--", *work]
        told = {**self._remote.node.environment, "VGPU_REMOTE_TOKEN": self.token}
        return subprocess.Popen(
            words, env=told, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def end(self, case: str, process: "subprocess.Popen[str]") -> float | None:
        try:
            said, errors = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
            errors += "\nno end within 90 s"
        lines = [line for line in said.splitlines() if line.startswith("{")]
        rate = json.loads(lines[-1])["rate"] if lines else None
        row = {"case": case, "rate": rate, "code": process.returncode}
        if rate is None:
            row["error"] = errors[-1500:]
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return rate

    def run(self, case: str, kind: str, where: str, *options: str, **more: Any) -> float | None:
        return self.end(case, self.start(kind, where, *options, **more))


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
    try:
        bench.run("memory, remote, 4 GiB (MiB)", "memory", "remote", "--memory", "4GiB")
        for kind in ("decode", "train", "spin"):
            bench.run(f"{kind}, native", kind, "native")
            bench.run(f"{kind}, local, 16 GiB", kind, "local", "--memory", "16GiB")
            bench.run(f"{kind}, remote, 16 GiB", kind, "remote", "--memory", "16GiB")
        beside = bench.start("spin", "local", "--memory", "8GiB", "--cores", "75", seconds=25)
        bench.run(
            "spin, remote, 25 beside 75", "spin", "remote", "--memory", "8GiB", "--cores", "25", seconds=8
        )
        bench.end("spin, local, 75 beside 25", beside)
        for milliseconds in (0.1, 0.5, 2.0):
            late = Delay(remote.port, milliseconds / 2000)
            for kind in ("decode", "train"):
                case = f"{kind}, remote, {milliseconds} ms"
                bench.run(case, kind, "remote", "--memory", "8GiB", port=late.port)
    finally:
        arguments.out.write_text(
            json.dumps({"rows": bench.rows, "log": remote.log.read_text()[-4000:]}, indent=1)
        )
        remote.close()
        node.stop()
        node.remove()


if __name__ == "__main__":
    main()
