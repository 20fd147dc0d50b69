"""Many callers of one socket, each with its own connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from tests.bench.common import Row, at_once, latency_row
from tests.bench.echo import METHOD
from tests.bench.samples import MEMORY_BYTES
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen import vgpud_pb2_grpc as rpc

# by default all channels of a process to one address share a connection
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def channels(socket: Path, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    opened = [grpc.aio.insecure_channel(f"unix:{socket}", options=_OWN_CONNECTION) for _ in range(count)]
    try:
        await asyncio.gather(*[channel.channel_ready() for channel in opened])
        yield opened
    finally:
        await asyncio.gather(*[channel.close() for channel in opened])


async def echoes(socket: Path, clients: int, calls: int) -> Row:
    """Round trips of a message as large as an AllocateRequest."""
    message = _request("echo-000000").SerializeToString()
    async with channels(socket, clients) as opened:
        say: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(METHOD) for channel in opened
        ]

        async def call(client: int, _: int) -> None:
            assert await say[client](message) == message

        await at_once(clients, clients * 5, call)  # warm-up
        return latency_row(f"bare grpcio echo, {clients} clients", *await at_once(clients, calls, call))


def _request(name: str) -> pb.AllocateRequest:
    return pb.AllocateRequest(request_id=name, memory_bytes=MEMORY_BYTES, isolation="quota", label="bench")


class Tenants:
    """Allocates and releases through the tenants' socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._number = 0

    async def pairs(self, clients: int, calls: int, note: str) -> tuple[Row, Row]:
        """Measures Allocate and Release. Each caller releases its allocation before it allocates again."""
        released: list[float] = []
        async with channels(self._socket, clients) as opened:
            stubs = [rpc.VgpudStub(channel) for channel in opened]
            held: dict[int, str] = {}

            async def allocate(client: int, _: int) -> None:
                held[client] = (await stubs[client].Allocate(self._next())).id

            async def release(client: int, _: int) -> None:
                await stubs[client].Release(pb.ReleaseRequest(allocation_id=held.pop(client)))

            async def warm(client: int, number: int) -> None:
                await allocate(client, number)
                await release(client, number)

            await at_once(clients, clients * 2, warm)
            taken: list[float] = []
            taking = giving = 0.0
            for _ in range(max(1, calls // clients)):
                seconds, elapsed = await at_once(clients, clients, allocate)
                taken += seconds
                taking += elapsed
                seconds, elapsed = await at_once(clients, clients, release)
                released += seconds
                giving += elapsed
        name = f"{clients} clients, {note}"
        return (
            latency_row(f"Allocate, {name}", taken, taking),
            latency_row(f"Release, {name}", released, giving),
        )

    async def take(self, count: int) -> list[str]:
        """Makes `count` allocations and keeps them. Returns their ids."""
        ids: list[str] = []
        async with channels(self._socket, 8) as opened:
            stubs = [rpc.VgpudStub(channel) for channel in opened]

            async def allocate(client: int, _: int) -> None:
                ids.append((await stubs[client].Allocate(self._next())).id)

            await at_once(8, count, allocate)
        return ids

    async def devices(self) -> tuple[str, ...]:
        async with channels(self._socket, 1) as (channel,):
            reply = await rpc.VgpudStub(channel).ListDevices(pb.ListDevicesRequest())
            return tuple(device.uuid for device in reply.devices)

    async def states(self) -> dict[str, int]:
        """The number of allocations in each state."""
        options = [*_OWN_CONNECTION, ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            reply = await rpc.VgpudStub(channel).ListAllocations(pb.ListAllocationsRequest())
        counts: dict[str, int] = {}
        for one in reply.allocations:
            counts[one.state] = counts.get(one.state, 0) + 1
        return counts

    def _next(self) -> pb.AllocateRequest:
        self._number += 1
        return _request(f"bench-{id(self):x}-{self._number:06d}")
