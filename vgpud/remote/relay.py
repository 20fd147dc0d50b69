"""Relays bytes between two connections, for the client and the door. It needs only the standard library."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from contextlib import suppress

PIECE_BYTES = 256 * 1024  # buffer for each direction of a connection
_LENGTH_BYTES = 4
_FLUSH_SECONDS = 30.0

Stream = tuple[StreamReader, StreamWriter]
Seen = Callable[[int], Awaitable[None]]


async def _unseen(_size: int) -> None:
    pass


async def relay(plain: Stream, pieces: Stream, seen: Seen = _unseen) -> None:
    """Copies in both directions until both have ended, or a connection is lost. Then closes both connections.

    `plain` is the connection to a program or to the engine's server. `pieces` is the connection between
    client and door: TLS cannot close one direction alone, so the data is sent in pieces with their length
    before them, and a piece of length 0 ends a direction. The other direction stays open, even if no data
    comes for long. `seen` is called with the size of each piece, and can delay the next one.
    """
    join = asyncio.ensure_future(_join(pieces[0], plain[1], seen))
    ways = [join, asyncio.ensure_future(_cut(plain[0], pieces[1], seen))]
    both: asyncio.Future[list[None]] = asyncio.gather(*ways)
    lost = asyncio.ensure_future(_lost(join, pieces[0]))
    try:
        await asyncio.wait((both, lost), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*ways, lost):
            task.cancel()
        await asyncio.gather(both, *ways, lost, return_exceptions=True)
    await asyncio.gather(finish(plain[1]), finish(pieces[1]))


async def _lost(join: "asyncio.Task[None]", source: StreamReader) -> None:
    """Waits until `join` has ended its direction, and then until `source` is lost: no more data can come."""
    await asyncio.wait([join])
    if not join.cancelled() and join.exception() is None:
        with suppress(OSError):
            await source.read(1)


async def _cut(source: StreamReader, target: StreamWriter, seen: Seen) -> None:
    while data := await source.read(PIECE_BYTES):
        target.write(len(data).to_bytes(_LENGTH_BYTES) + data)
        await target.drain()  # while the target takes no data, nothing more is read from the source
        await seen(len(data))
    target.write(bytes(_LENGTH_BYTES))
    await target.drain()


async def _join(source: StreamReader, target: StreamWriter, seen: Seen) -> None:
    """Copies the contents of the pieces from `source` to `target`. Raises IncompleteReadError if the source
    ends before the piece of length 0.
    """
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
    """Sends the buffered data, then closes the connection. The data is dropped if the peer does not read it
    in time.
    """
    try:
        async with asyncio.timeout(_FLUSH_SECONDS):
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        pass  # the connection is lost


def drop(writer: StreamWriter) -> None:
    """Aborts a connection, unless it is already being closed: asyncio cannot abort TLS then."""
    if not writer.is_closing():
        writer.transport.abort()
