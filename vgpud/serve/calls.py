"""Implements the methods of vgpud.v1.Vgpud for grpc.aio: bytes in, bytes out, errors as status details."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from vgpud import audit, clock
from vgpud.api.doors import CHANGING
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.status import to_status
from vgpud.model.caller import Caller
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.event import Event
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.handlers import HANDLERS, Handler, event_for
from vgpud.serve.peers import PeerTable
from vgpud.serve.permissions import check_door, may_see_edits
from vgpud.serve.running import Abandoned, Running

log = structlog.get_logger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Vgpud"]

_DELIVERIES_PER_USER = 4  # maximum of concurrent deliveries of events to one user
# Interval between deliveries of events to all users other than root together. It keeps deliveries at about a
# tenth of the event loop's time.
_DELIVERY_SECONDS = 1 / 500
# The start of a watch that reads past events takes as long a turn as this number of deliveries, so that users
# that start watches again and again delay no changes.
_HISTORY_DELIVERIES = 10
_TAKE_SECONDS = 30.0

Context = grpc.aio.ServicerContext[Any, Any]


class Calls:
    """Binds each method of the service to its handler."""

    def __init__(self, keeper: NodeKeeper, peers: PeerTable, drop: Callable[[str], None]) -> None:
        self.running = Running()
        self._keeper = keeper
        self._peers = peers
        self._drop = drop
        # The encoded bytes of the last event, with the allocation's edits (True) and without (False).
        self._written: dict[bool, tuple[Event, Allocation | None, bytes]] = {}
        # Deliveries are paced, so that an event for thousands of watchers of one user does not delay other
        # users.
        self._next_delivery = 0.0  # time of the daemon's clock at which the next delivery may begin
        self._deliveries: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        self._stopping = asyncio.Event()

    def generic_handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(name, handler))
            for name, handler in HANDLERS.items()
        }
        methods["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    def stop(self) -> None:
        """Refuses new calls, and ends the watches, which would last as long as their callers read them."""
        self._stopping.set()

    # --- calls with one request and one reply

    def _unary(self, name: str, handler: Handler) -> Callable[[bytes, Context], Any]:
        request_class = GetMessageClass(SERVICE.methods_by_name[name].input_type)
        changing = name in CHANGING

        async def call(data: bytes, context: Context) -> bytes:
            try:
                caller = self._caller(name, context)
                asked = parse(request_class, data)
                work = handler(self._keeper, caller, asked)
                if changing:
                    reply = await self.running.finish(name, work, self._if_abandoned(asked, caller))
                else:
                    reply = await work
                encoded: bytes = reply.SerializeToString()
                return encoded
            except VgpuError as error:
                failure = error
            except Exception:
                failure = _bug(name)
            return await _abort(context, failure)

        return call

    def _caller(self, name: str, context: Context) -> Caller:
        if self._stopping.is_set():
            raise _stopping()
        caller = self._peers.caller(context.peer())
        audit.asked_by(caller)
        try:
            check_door(name, caller)
        except VgpuError as refusal:
            audit.record(name, refusal)
            raise
        return caller

    def _if_abandoned(self, asked: Message, caller: Caller) -> Abandoned | None:
        if not isinstance(asked, pb.AllocateRequest) or asked.request_id:
            return None

        async def release(held: pb.Allocation) -> None:
            # the caller did not get the allocation's id, so it cannot release the allocation
            try:
                with audit.because(
                    f"uid {caller.uid} disconnected before the reply, and did not learn the allocation's id"
                ):
                    await self._keeper.release(held.id, caller, force=True)
            except VgpuError as error:
                log.warning(
                    LogEvent.ALLOCATION_UNKNOWN_TO_CALLER_NOT_RELEASED, allocation=held.id, why=str(error)
                )

        return release

    # --- the watch of events

    async def _watch(self, data: bytes, context: Context) -> None:
        try:
            await self._send_events(data, context)
            return
        except VgpuError as error:
            failure = error
        except Exception:
            failure = _bug("Watch")
        await _abort(context, failure)

    async def _send_events(self, data: bytes, context: Context) -> None:
        caller = self._caller("Watch", context)
        asked = parse(pb.WatchRequest, data)
        turns = self._deliveries.setdefault(caller.user, asyncio.Semaphore(_DELIVERIES_PER_USER))
        if asked.HasField("after_revision") and caller.user != 0:
            async with turns:
                await self._delivery_turn(_HISTORY_DELIVERIES)
        events = self._keeper.store.subscribe(
            asked.after_revision if asked.HasField("after_revision") else None
        )
        # A watch is asked to stop and not cancelled, because a cancellation might interrupt grpc during a
        # write.
        stopping = asyncio.ensure_future(self._stopping.wait())
        upcoming = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.sleep(0)
            # no event is waiting, so the initial metadata tells the caller that it is subscribed
            if not upcoming.done():
                await context.send_initial_metadata(())
            while True:
                await asyncio.wait((upcoming, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done():
                    raise _stopping()
                item = upcoming.result()
                if item is None:
                    return
                async with turns:
                    if caller.user != 0:
                        await self._delivery_turn()
                    await self._write(self._shown(caller, *item), context)
                upcoming = asyncio.ensure_future(anext(events, None))
        finally:
            stopping.cancel()
            upcoming.cancel()
            await asyncio.gather(stopping, upcoming, return_exceptions=True)
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    async def _delivery_turn(self, count: int = 1) -> None:
        now = clock.now()
        self._next_delivery = max(self._next_delivery, now) + count * _DELIVERY_SECONDS
        await asyncio.sleep(self._next_delivery - now)

    def _shown(self, caller: Caller, happened: Event, held: Allocation | None) -> bytes:
        """The bytes of an event for this caller. They are encoded once for all watchers with the same rights
        on the allocation.
        """
        sees = held is not None and may_see_edits(caller, held.request.owner.uid)
        before = self._written.get(sees)
        if before is None or before[0] is not happened or before[1] is not held:
            before = happened, held, event_for(caller, happened, held).SerializeToString()
            self._written[sees] = before
        return before[2]

    async def _write(self, data: bytes, context: Context) -> None:
        """Sends an event to a watcher. A watcher that does not read it in time loses its connection."""
        timer = asyncio.get_running_loop().call_later(_TAKE_SECONDS, self._drop, context.peer())
        try:
            await context.write(data)
        finally:
            timer.cancel()


def parse(request_class: type[Message], data: bytes) -> Any:  # noqa: ANN401
    """Parses the request message in `data`. Raises VgpuError(BAD_REQUEST)."""
    try:
        return request_class.FromString(data)
    except DecodeError:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"a request of {len(data)} bytes is not a valid {request_class.DESCRIPTOR.name}",
            "check that the caller and vgpud have the same version",
        ) from None


def _stopping() -> VgpuError:
    return VgpuError(ErrorCode.STOPPING, "vgpud is stopping", "try again when 'vgpuctl status' answers")


def _bug(name: str) -> VgpuError:
    """Logs the exception that is being handled, and returns an error for the caller without its details."""
    log.exception(LogEvent.BUG_IN_API_CALL, call=name)
    return VgpuError(
        ErrorCode.BUG,
        f"a bug in vgpud made {name} fail",
        "report this with the journal of vgpud",
    )


async def _abort(context: Context, failure: VgpuError) -> NoReturn:
    await context.abort_with_status(to_status(failure))
