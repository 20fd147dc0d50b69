"""Measures the cost of the relay and of vgpud's call path, beside a plain grpcio echo.

    python -m tests.serve.bench_relay [CALLS]

The echo server, the relay and the client are three processes, or the server and the relay share one as they
do in vgpud. Prints microseconds per call. This is not a test: it asserts nothing.
"""

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc

from tests.serve.fake_keeper import FakeKeeper
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.relay import ConnectionLimits, Relay
from vgpud.serve.server import Server
from vgpud.serve.sockets import private_folder, public_sockets


async def _echo(data: bytes, context: Any) -> bytes:
    return data


async def _serve(run_dir: Path) -> None:
    folder = private_folder(run_dir)
    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.B", methods),))
    server.add_insecure_port(f"unix:{folder}/echo.sock")
    await server.start()
    sockets = public_sockets(run_dir, "", {})
    relay = Relay(sockets.listening, folder / "echo.sock", folder, ConnectionLimits())
    relay.start()
    whole = run_dir / "whole"
    doors = Server(cast(NodeKeeper, _Still()), public_sockets(whole, "", {}))
    await doors.start()
    await asyncio.sleep(3600)


class _Still(FakeKeeper):
    """A keeper that forgets each allocation, so all calls cost the same."""

    async def allocate(self, request: Any, allocation_id: str | None = None) -> Any:
        held = await super().allocate(request)
        self.held.clear()
        self.events.clear()
        self.requests.clear()
        return held


def _server(run_dir: str) -> None:
    asyncio.run(_serve(Path(run_dir)))


def _measure(call: Callable[[], object], calls: int) -> tuple[float, float]:
    for _ in range(200):
        call()
    took = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took), statistics.quantiles(took, n=100)[98]


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    run_dir = tempfile.mkdtemp(prefix="vgb-")
    process = multiprocessing.get_context("spawn").Process(target=_server, args=(run_dir,), daemon=True)
    process.start()
    while not Path(run_dir, "whole/admin.sock").exists():
        time.sleep(0.05)
    body = pb.AllocateRequest(request_id="r", memory_bytes=2**30, share_percent=12.5)
    data = body.SerializeToString()
    places = {
        "echo, direct": (f"{run_dir}/private/echo.sock", "/bench.B/Echo"),
        "echo, through the relay": (f"{run_dir}/admin.sock", "/bench.B/Echo"),
        "Allocate of a fake keeper": (f"{run_dir}/whole/admin.sock", "/vgpud.v1.Vgpud/Allocate"),
    }
    for turn in range(2):
        for name, (path, method) in places.items():
            with grpc.insecure_channel(f"unix:{path}") as channel:
                remote: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
                p50, p99 = _measure(partial(remote, data), calls)
                print(f"{turn + 1}. {name:28} p50 {p50:7.0f} us   p99 {p99:7.0f} us")
    process.kill()
    process.join()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
