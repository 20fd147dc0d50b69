"""Bounds the gRPC load of one user: calls, messages being received, watches, and how long each may take.

A message may take 128 KiB, so the number of messages in transit is bounded. The server passes each call on
after its headers. This module then reads the message, in turn with the other messages of the same user. A
caller that does not finish its message or read its reply in time loses its connection.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import grpc

from vgpud.api.doors import CHANGING
from vgpud.api.status import to_status
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.shares import Shares
from vgpud.pace import Pace
from vgpud.serve.change_turns import ChangeTurns
from vgpud.serve.metered import Metered
from vgpud.serve.peers import PeerTable

Context = grpc.aio.ServicerContext[Any, Any]
# Pause factor: calls that change nothing, of users other than root, get a tenth of the event loop's time. The
# time that grpcio and the relay need for the replies comes on top.
_READ_REST_FACTOR = 9.0
# Time that is charged when a call that changes nothing begins. The rest of its time is charged when it ends.
_LEAST_READ_SECONDS = 0.0005

# A call with the user of its caller. The caller is identified before its message is read, because afterwards
# its connection may be closed.
UserCall = Callable[[int, Any, Context], Awaitable[Any]]
Handler = Any  # a grpc.RpcMethodHandler, a class that is not generic at run time


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits for each user and for all users. A stranger is a caller at ro.sock."""

    calls: int = 4096
    calls_per_user: int = 1024
    calls_per_stranger: int = 64
    watches: int = 128  # maximum of watches, because each event goes to all of them
    watches_per_user: int = 16
    messages_per_user: int = 16
    unread_bytes_per_user: int = 32 * 1024 * 1024
    root: int = 1024  # calls and watches that are reserved for root, in addition
    message_seconds: float = 5.0
    reply_seconds: float = 30.0
    change_seconds: float = 0.25


class Intake(grpc.aio.ServerInterceptor):
    """Bounds the load. `drop` ends the connection of a peer, named as in grpc. `taken` is called for each
    call of a peer.
    """

    def __init__(
        self, peers: PeerTable, drop: Callable[[str], None], taken: Callable[[str], None], bounds: Bounds
    ) -> None:
        self._peers = peers
        self._drop = drop
        self._taken = taken
        self._bounds = bounds
        self.calls = Shares(bounds.calls, bounds.calls_per_user, bounds.root)
        self.strangers_calls = Shares(bounds.calls, bounds.calls_per_stranger, bounds.root)
        self.watches = Shares(bounds.watches, bounds.watches_per_user, bounds.root)
        self.unread_bytes: Counter[int] = Counter()  # bytes of replies that are not yet sent, by user
        self.receiving = 0  # number of messages in transit, each of which may have the maximum size
        self._reads = Pace(_READ_REST_FACTOR)
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        self._changes = ChangeTurns(bounds.change_seconds)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        name = details.method.rpartition("/")[2]
        return None if handler is None else self._bounded(name, handler)

    def _bounded(self, name: str, handler: Handler) -> Handler:
        """Wraps a method so that its message is read here. (On the wire, a request of one message equals a
        stream of one message.)
        """
        coders = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            in_turn = self._one_at_a_time if name in CHANGING else self._paced
            inner = in_turn(handler.unary_unary)
            return grpc.stream_unary_rpc_method_handler(self._call(inner), *coders)
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._watch(handler.unary_stream), *coders)
        return grpc.stream_stream_rpc_method_handler(self._dialogue(handler.stream_stream), *coders)

    def _call(self, inner: UserCall) -> Callable[[object, Context], Any]:
        async def serve(_: object, context: Context) -> Any:  # noqa: ANN401
            caller = await self._admitted(context, self._shares_of)
            asked = await self._received(caller, context)
            reply = await inner(caller.user, asked, context)
            # grpc sends the reply after this function has returned, and calls back when it is sent
            await self._owed(reply, caller, context)
            self._dropped_after(self._bounds.reply_seconds, context)
            return reply

        return serve

    def _paced(self, inner: Callable[[Any, Context], Coroutine[Any, Any, Any]]) -> UserCall:
        """Wraps a call that changes nothing. Such calls begin in turns of the users and at a limited rate, so
        that all users except root together get a part of the event loop's time. Calls may overlap, because
        one can wait for a device.
        """

        async def serve(user: int, asked: object, context: Context) -> Any:  # noqa: ANN401
            if user == 0:
                return await inner(asked, context)
            async with self._reads.turn(user):
                self._reads.took(_LEAST_READ_SECONDS)
            work = Metered(inner(asked, context))
            try:
                return await work
            finally:
                self._reads.took(max(work.seconds - _LEAST_READ_SECONDS, 0.0))

        return serve

    def _one_at_a_time(self, inner: Callable[[Any, Context], Coroutine[Any, Any, Any]]) -> UserCall:
        async def serve(user: int, asked: object, context: Context) -> Any:  # noqa: ANN401
            return await self._changes.run(user, lambda: inner(asked, context))

        return serve

    def _watch(self, inner: Callable[[Any, Context], Awaitable[None]]) -> Callable[[object, Context], Any]:
        async def serve(_: object, context: Context) -> None:
            caller = await self._admitted(context, lambda _: self.watches)
            await inner(await self._received(caller, context), context)

        return serve

    def _dialogue(self, inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
        """Wraps gRPC reflection: a few requests, which together have the time limit of one reply."""

        async def serve(requests: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
            await self._admitted(context, self._shares_of)
            self._dropped_after(self._bounds.reply_seconds, context)
            async for reply in inner(requests, context):
                yield reply

        return serve

    def _shares_of(self, caller: Caller) -> Shares:
        return self.strangers_calls if caller.door is Door.READ else self.calls

    async def _admitted(self, context: Context, shares_of: Callable[[Caller], Shares]) -> Caller:
        """Admits a call and returns its caller. The caller has a share of the limits until the call ends. The
        message of a refused call is not read.
        """
        self._taken(context.peer())
        try:
            caller = self._peers.caller(context.peer())
            shares = shares_of(caller)
        except VgpuError as refusal:
            return await _abort(context, refusal)
        if not shares.take(caller.user):
            own = f"{shares.taken_by(caller.user)} of the {shares.taken} calls under way are its own"
            full = VgpuError(
                ErrorCode.NO_CAPACITY,
                f"uid {caller.user} can start no more calls now: {own}",
                "wait for some of them to end",
            )
            return await _abort(context, full)
        _when_over(context, lambda: shares.give_back(caller.user))
        return caller

    async def _received(self, caller: Caller, context: Context) -> Any:  # noqa: ANN401
        turns = self._turns.setdefault(caller.user, asyncio.Semaphore(self._bounds.messages_per_user))
        async with turns:
            timer = self._drop_after(self._bounds.message_seconds, context)
            self.receiving += 1
            try:
                asked = await context.read()
            finally:
                self.receiving -= 1
                timer.cancel()
        if asked is grpc.aio.EOF:
            await _abort(
                context,
                VgpuError(
                    ErrorCode.BAD_REQUEST,
                    "the call ended before its request message",
                    "send one request message",
                ),
            )
        return asked

    async def _owed(self, reply: object, caller: Caller, context: Context) -> None:
        """Counts the bytes of a reply until it is sent. A user with too many unread bytes gets no further
        replies.
        """
        length = len(reply) if isinstance(reply, bytes) else 0
        unread = self.unread_bytes[caller.user]
        if unread and unread + length > self._bounds.unread_bytes_per_user and not caller.is_admin:
            await _abort(
                context,
                VgpuError(
                    ErrorCode.NO_CAPACITY,
                    f"uid {caller.user} has {unread} bytes of replies unread",
                    "read the replies that are there before asking for more",
                ),
            )
        self.unread_bytes[caller.user] += length

        def sent() -> None:
            self.unread_bytes[caller.user] -= length
            if not self.unread_bytes[caller.user]:
                del self.unread_bytes[caller.user]

        _when_over(context, sent)

    def _drop_after(self, seconds: float, context: Context) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._drop, context.peer())

    def _dropped_after(self, seconds: float, context: Context) -> None:
        timer = self._drop_after(seconds, context)
        _when_over(context, timer.cancel)


def _when_over(context: Context, work: Callable[[], None]) -> None:
    """Calls `work` when the call has ended and its data has been sent."""
    context.add_done_callback(lambda _: work())  # type: ignore[arg-type] # the stub names its parameter


async def _abort(context: Context, failure: VgpuError) -> NoReturn:
    await context.abort_with_status(to_status(failure))
