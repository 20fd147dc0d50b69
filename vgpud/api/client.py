"""A small client of vgpud, one call at a time. Importing it loads neither grpc nor protobuf.

    with Client() as client:
        for held in client.list_allocations().allocations:
            ...

A call returns the reply message of vgpud.proto (`watch` yields events). It raises VgpuError: the daemon's
own, or that of a failure on the way, such as UNREACHABLE, DEADLINE or NOT_ALLOWED.
"""

# mypy: disable-error-code="no-any-return"
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from vgpud.api.doors import LEAST_DOOR
from vgpud.api.sockets import usable_socket

if TYPE_CHECKING:
    import grpc

    from vgpud.api.gen import vgpud_pb2 as pb
    from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub

# how long, and at what interval, a client tries to get into the full queue of a listener
_FULL_SECONDS, _FULL_AGAIN_SECONDS = 5.0, 0.02
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # The subchannel pool is local to this client: with the global pool, the client would reuse the connection
    # of another client in this process, for example one to a vgpud that has ended.
    ("grpc.use_local_subchannel_pool", 1),
    # The limit on a reply is high, because the daemon is trusted and a listing is one message (no pages).
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_metadata_size", 64 * 1024),
)


def _quiet_grpc() -> None:
    """Silences gRPC's fork handlers and log. Precondition: grpc is not loaded yet.

    Callers start children (vgpuctl run): the fork handlers disturb these, and the log would mix with their
    output.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _is_full(failure: "grpc.RpcError") -> bool:
    """True if the listener's queue of connections was full. gRPC takes the kernel's answer to connect(2),
    EAGAIN, for a connection that is being made, and fails when it sends. vgpud has not seen the call.
    """
    return os.strerror(errno.ENOTCONN) in str(getattr(failure, "details", str)())


class Client:
    """`socket` is used in place of the usual one. `timeout_seconds` bounds each call except `watch`; with
    None no call is bounded.
    """

    def __init__(self, socket: Path | None = None, timeout_seconds: float | None = 30.0) -> None:
        self._named = socket
        self._timeout_seconds = timeout_seconds
        self._channels: dict[Path, tuple[grpc.Channel, VgpudStub]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel, _ in self._channels.values():
            channel.close()
        self._channels.clear()

    # --- calls that only read

    def get_node(self) -> "pb.NodeReply":
        return self._call("GetNode")

    def list_devices(self) -> "pb.ListDevicesReply":
        return self._call("ListDevices")

    def get_allocation(self, allocation_id: str) -> "pb.Allocation":
        return self._call("GetAllocation", allocation_id=allocation_id)

    def list_allocations(self) -> "pb.ListAllocationsReply":
        return self._call("ListAllocations")

    def plan(self, request: "pb.AllocateRequest") -> "pb.PlanReply":
        """Returns what `allocate` would do now; a refusal is part of the reply."""
        return self._call("Plan", request=request)

    def get_policy(self) -> "pb.PolicyReply":
        return self._call("GetPolicy")

    def get_usage(self) -> "pb.UsageReply":
        return self._call("GetUsage")

    def list_processes(self) -> "pb.ListProcessesReply":
        return self._call("ListProcesses")

    def list_events(self, last: int = 0, user: int | None = None) -> "pb.ListEventsReply":
        """Returns the latest kept events (of `user`, if it is given), oldest first; `last` = 0 means 100
        events.
        """
        return self._call("ListEvents", last=last, user=user)

    def watch(self, after_revision: int | None = None) -> Iterator["pb.Event"]:
        """Yields the kept events above revision `after_revision`, then live ones until the iterator is
        closed.

        The daemon has subscribed the client when this method returns. The iterator raises VgpuError:
        BAD_REVISION if that revision is no longer kept or not yet reached, STOPPING when the daemon stops or
        the client reads too slowly.
        """
        socket = usable_socket(self._named, LEAST_DOOR["Watch"])
        _quiet_grpc()
        import grpc

        from vgpud.api.gen import vgpud_pb2 as pb
        from vgpud.api.status import from_rpc_error

        stream = self._stub(socket).Watch(pb.WatchRequest(after_revision=after_revision))
        stream.initial_metadata()  # waits until the daemon has subscribed this client

        def events() -> Iterator[pb.Event]:
            try:
                yield from stream
            except grpc.RpcError as failure:
                raise from_rpc_error(failure, socket, None) from None
            finally:
                stream.cancel()

        return events()

    # --- calls that change something

    def allocate(self, request: "pb.AllocateRequest") -> "pb.Allocation":
        """Allocates slices. With a unique `request_id`, an interrupted call can be repeated safely."""
        return self._call("Allocate", request=request)

    def release(self, allocation_id: str, force: bool = False) -> "pb.ReleaseReply":
        return self._call("Release", allocation_id=allocation_id, force=force)

    def resize(
        self, allocation_id: str, memory_bytes: int | None = None, share_percent: float | None = None
    ) -> "pb.Allocation":
        return self._call(
            "Resize",
            allocation_id=allocation_id,
            memory_bytes=memory_bytes,
            share_percent=share_percent,
        )

    def pause(self, allocation_id: str) -> "pb.Allocation":
        return self._call("Pause", allocation_id=allocation_id)

    def unpause(self, allocation_id: str) -> "pb.Allocation":
        return self._call("Unpause", allocation_id=allocation_id)

    def suspend(self, allocation_id: str, deep: bool = False) -> "pb.Allocation":
        """Suspends an allocation. If the connection breaks, the daemon finishes the suspension."""
        return self._call("Suspend", allocation_id=allocation_id, deep=deep)

    def resume(self, allocation_id: str) -> "pb.Allocation":
        """Resumes an allocation. If the connection breaks, the daemon finishes the resumption."""
        return self._call("Resume", allocation_id=allocation_id)

    def move(self, allocation_id: str, to: Sequence[str], source: str = "") -> "pb.Allocation":
        """Moves an allocation to the devices whose UUIDs are in `to`. If the connection breaks, the daemon
        finishes the move.
        """
        return self._call("Move", allocation_id=allocation_id, to=to, source=source)

    def plan_defrag(self, request: "pb.DefragRequest") -> "pb.DefragReply":
        """Returns what `defrag` would do now."""
        return self._call("PlanDefrag", request=request)

    def defrag(self, request: "pb.DefragRequest") -> "pb.DefragReply":
        """Moves tenants to make room for a request. If the connection breaks, the daemon finishes the
        moves.
        """
        return self._call("Defrag", request=request)

    def reload_policy(self, dry_run: bool = False) -> "pb.ReloadPolicyReply":
        return self._call("ReloadPolicy", dry_run=dry_run)

    def list_mps(self) -> "pb.ListMpsReply":
        return self._call("ListMps")

    def terminate_mps_client(self, device_uuid: str, pid: int) -> None:
        """Ends the work of an MPS client. Raises VgpuError: NO_SUCH_DEVICE, NO_SUCH_CLIENT, MPS_REFUSED."""
        self._call("TerminateMpsClient", device_uuid=device_uuid, pid=pid)

    def drain_device(
        self, device_uuid: str, undrain: bool = False, move: bool = False
    ) -> "pb.DrainDeviceReply":
        return self._call("DrainDevice", device_uuid=device_uuid, undrain=undrain, move=move)

    def list_mig(self) -> "pb.ListMigReply":
        return self._call("ListMig")

    def plan_mig(self, request: "pb.MigRequest") -> "pb.MigPlanReply":
        """Returns what `apply_mig` would do now; a refusal is part of the reply."""
        return self._call("PlanMig", request=request)

    def apply_mig(self, request: "pb.MigRequest") -> "pb.MigPlanReply":
        """Changes MIG layouts. The reply says what was done. If the connection breaks, the daemon finishes
        the change.
        """
        return self._call("ApplyMig", request=request)

    # --- making a call

    def _call(
        self,
        method: str,
        request: Any = None,  # noqa: ANN401 (a message)
        **fields: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 (a message)
        """Makes one gRPC call with the message `request`, or with the method's request message built from
        `fields`.
        """
        socket = usable_socket(self._named, LEAST_DOOR[method])
        _quiet_grpc()
        import grpc

        from vgpud.api.gen import vgpud_pb2 as pb
        from vgpud.api.status import from_rpc_error

        if request is None:
            service = pb.DESCRIPTOR.services_by_name["Vgpud"]
            request = getattr(pb, service.methods_by_name[method].input_type.name)(**fields)
        end = time.monotonic() + _FULL_SECONDS
        while True:
            try:
                return getattr(self._stub(socket), method)(request, timeout=self._timeout_seconds)
            except grpc.RpcError as failure:
                if not _is_full(failure) or time.monotonic() > end:
                    raise from_rpc_error(failure, socket, self._timeout_seconds) from None
            # The gRPC channel is replaced, because it would pause for a second before it connects again.
            self._channels.pop(socket)[0].close()
            time.sleep(_FULL_AGAIN_SECONDS)

    def _stub(self, socket: Path) -> "VgpudStub":
        known = self._channels.get(socket)
        if known is None:
            import grpc

            from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub

            channel = grpc.insecure_channel(f"unix:{quote(str(socket.absolute()))}", options=_OPTIONS)
            known = self._channels[socket] = (channel, VgpudStub(channel))
        return known[1]
