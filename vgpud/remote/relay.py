"""Relays bytes between two connections, for the client and the door. It needs only the standard library."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

PIECE_BYTES = 256 * 1024  # buffer for each direction of a connection
_FLUSH_SECONDS = 30.0
_REST_SECONDS = 30.0  # for the other side's last pieces after one side has ended

Stream = tuple[StreamReader, StreamWriter]


async def relay(near: Stream, far: Stream, seen: Callable[[int], Awaitable[None]] | None = None) -> None:
    """Copies both ways until one side ends. What that side has sent still reaches the other, and then the
    end, where the connection has ends of one direction (TCP has, asyncio's TLS has not). The other side may
    then send its last pieces for 30 s. `seen` is told the size of each piece, and can delay the next one.
    Closes both connections.
    """
    ways = {
        asyncio.ensure_future(_copy(source[0], target[1], seen)): target[1]
        for source, target in ((near, far), (far, near))
    }
    try:
        (first, *_), rest = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        target = ways[first]
        if first.exception() is None and target.can_write_eof() and not target.is_closing():
            target.write_eof()
            await asyncio.wait(rest, timeout=_REST_SECONDS)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    await asyncio.gather(finish(near[1]), finish(far[1]))


async def _copy(
    source: StreamReader, target: StreamWriter, seen: Callable[[int], Awaitable[None]] | None
) -> None:
    while data := await source.read(PIECE_BYTES):
        target.write(data)
        await target.drain()  # a slow target stops the source
        if seen is not None:
            await seen(len(data))


async def finish(writer: StreamWriter) -> None:
    """Sends what is written, then closes the connection. A peer that does not read loses it."""
    try:
        async with asyncio.timeout(_FLUSH_SECONDS):
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        pass  # the connection is lost


def drop(writer: StreamWriter) -> None:
    """Ends a connection at once. One that is closed already stays so: asyncio's TLS cannot abort it."""
    if not writer.is_closing():
        writer.transport.abort()
