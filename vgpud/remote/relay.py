"""Relays bytes between two connections, for the client and the door. It needs only the standard library."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

PIECE_BYTES = 256 * 1024  # buffer for each direction of a connection
_LENGTH_BYTES = 4
_FLUSH_SECONDS = 30.0
_REST_SECONDS = 30.0  # between pieces of one side after the other has ended

Stream = tuple[StreamReader, StreamWriter]
Seen = Callable[[int], Awaitable[None]]


async def relay(plain: Stream, pieces: Stream, seen: Seen | None = None) -> None:
    """Copies both ways until both have ended, or a connection is lost. `plain` is a connection of a program
    or of the engine, `pieces` the one between client and door: TLS has no end of one direction, so each piece
    there has its length before it, and one without bytes is the end of its direction. When one side has
    ended, the other may still send, with at most 30 s between its pieces. `seen` is told the size of each
    piece, and can delay the next one. Closes both connections.
    """
    moved = asyncio.Event()

    async def count(size: int) -> None:
        moved.set()
        if seen is not None:
            await seen(size)

    ways = [
        asyncio.ensure_future(_cut(plain[0], pieces[1], count)),
        asyncio.ensure_future(_join(pieces[0], plain[1], count)),
    ]
    try:
        done, rest = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        while rest and all(way.exception() is None for way in done):
            moved.clear()
            done, rest = await asyncio.wait(rest, timeout=_REST_SECONDS)
            if not moved.is_set():
                break
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    await asyncio.gather(finish(plain[1]), finish(pieces[1]))


async def _cut(source: StreamReader, target: StreamWriter, seen: Seen) -> None:
    while data := await source.read(PIECE_BYTES):
        target.write(len(data).to_bytes(_LENGTH_BYTES) + data)
        await target.drain()  # a slow target stops the source
        await seen(len(data))
    target.write(bytes(_LENGTH_BYTES))
    await target.drain()


async def _join(source: StreamReader, target: StreamWriter, seen: Seen) -> None:
    """Raises IncompleteReadError if the source ends without the end of its direction."""
    while left := int.from_bytes(await source.readexactly(_LENGTH_BYTES)):
        while left:
            data = await source.read(min(left, PIECE_BYTES))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            target.write(data)
            await target.drain()
            await seen(len(data))
    target.write_eof()


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
