"""A small client of vgpud, one call at a time. Importing it loads neither grpc nor protobuf.

    with Client() as client:
        for held in client.list_allocations().allocations:
            ...

Every method returns the reply message of vgpud.proto and raises VgpuError: the daemon's own, or
UNREACHABLE, DEADLINE or NOT_ALLOWED of this side.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from vgpud.api.sockets import usable_socket
from vgpud.model.caller import Door

if TYPE_CHECKING:
    import grpc

    from vgpud.api.gen import vgpud_pb2 as pb
    from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # else a client takes over what another one of this process has left open: of a vgpud that is gone since
    ("grpc.use_local_subchannel_pool", 1),
    # the daemon is trusted, and its listings have no pages
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_metadata_size", 64 * 1024),
)


def _quiet_grpc() -> None:
    """To be called before grpc is loaded.

    Callers start children (vgpuctl run): gRPC's fork handlers only get in their way, and its log
    would write between their lines.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Client:
    """`socket` overrides the choice; `timeout_seconds` bounds each call but `watch`, None does not."""

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

    # --- reading

    def get_node(self) -> "pb.NodeReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.NodeReply = self._call("GetNode", pb.GetNodeRequest())
        return reply

    def list_devices(self) -> "pb.ListDevicesReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListDevicesReply = self._call("ListDevices", pb.ListDevicesRequest())
        return reply

    def get_allocation(self, allocation_id: str) -> "pb.Allocation":
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.GetAllocationRequest(allocation_id=allocation_id)
        reply: pb.Allocation = self._call("GetAllocation", asked)
        return reply

    def list_allocations(self) -> "pb.ListAllocationsReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListAllocationsReply = self._call("ListAllocations", pb.ListAllocationsRequest())
        return reply

    def plan(self, request: "pb.AllocateRequest") -> "pb.PlanReply":
        """What `allocate` would do now; a refusal is part of the reply."""
        reply: pb.PlanReply = self._call("Plan", request)
        return reply

    def get_policy(self) -> "pb.PolicyReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.PolicyReply = self._call("GetPolicy", pb.GetPolicyRequest())
        return reply

    def get_usage(self) -> "pb.UsageReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.UsageReply = self._call("GetUsage", pb.GetUsageRequest())
        return reply

    def list_processes(self) -> "pb.ListProcessesReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListProcessesReply = self._call("ListProcesses", pb.ListProcessesRequest())
        return reply

    def list_events(self, last: int = 0) -> "pb.ListEventsReply":
        """The latest that are kept, oldest first; 0 means 100 of them."""
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListEventsReply = self._call("ListEvents", pb.ListEventsRequest(last=last))
        return reply

    def watch(self, after_revision: int | None = None) -> Iterator["pb.Event"]:
        """Events above `after_revision`, then live ones until the iterator is closed.

        It is listening when this returns. The iterator raises VgpuError: BAD_REVISION if that
        revision is no longer kept, STOPPING when the daemon stops.
        """
        socket = usable_socket(self._named, Door.READ)
        _quiet_grpc()
        import grpc

        from vgpud.api.gen import vgpud_pb2 as pb
        from vgpud.api.status import from_rpc_error

        stream = self._stub(socket).Watch(pb.WatchRequest(after_revision=after_revision))
        stream.initial_metadata()  # sent when the daemon has subscribed us

        def events() -> Iterator[pb.Event]:
            try:
                yield from stream
            except grpc.RpcError as failure:
                raise from_rpc_error(failure, socket, None) from None
            finally:
                stream.cancel()

        return events()

    # --- changing

    def allocate(self, request: "pb.AllocateRequest") -> "pb.Allocation":
        """Give `request_id` a value of its own, and a call cut short can be repeated safely."""
        reply: pb.Allocation = self._call("Allocate", request, Door.TENANT)
        return reply

    def release(self, allocation_id: str, force: bool = False) -> "pb.ReleaseReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.ReleaseRequest(allocation_id=allocation_id, force=force)
        reply: pb.ReleaseReply = self._call("Release", asked, Door.TENANT)
        return reply

    def resize(
        self, allocation_id: str, memory_bytes: int | None = None, share_percent: float | None = None
    ) -> "pb.Allocation":
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.ResizeRequest(
            allocation_id=allocation_id, memory_bytes=memory_bytes, share_percent=share_percent
        )
        reply: pb.Allocation = self._call("Resize", asked, Door.TENANT)
        return reply

    def suspend(self, allocation_id: str) -> "pb.Allocation":
        """The daemon goes on with it if this call is cut short."""
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.SuspendRequest(allocation_id=allocation_id)
        reply: pb.Allocation = self._call("Suspend", asked, Door.TENANT)
        return reply

    def resume(self, allocation_id: str) -> "pb.Allocation":
        """The daemon goes on with it if this call is cut short."""
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.ResumeRequest(allocation_id=allocation_id)
        reply: pb.Allocation = self._call("Resume", asked, Door.TENANT)
        return reply

    def move(self, allocation_id: str, to: Sequence[str], source: str = "") -> "pb.Allocation":
        """Devices by UUID. The daemon goes on with it if this call is cut short."""
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.MoveRequest(allocation_id=allocation_id, to=to, source=source)
        reply: pb.Allocation = self._call("Move", asked, Door.TENANT)
        return reply

    def plan_defrag(self, request: "pb.DefragRequest") -> "pb.DefragReply":
        """What `defrag` would do now."""
        reply: pb.DefragReply = self._call("PlanDefrag", request)
        return reply

    def defrag(self, request: "pb.DefragRequest") -> "pb.DefragReply":
        """The daemon goes on with it if this call is cut short."""
        reply: pb.DefragReply = self._call("Defrag", request, Door.ADMIN)
        return reply

    def reload_policy(self, dry_run: bool = False) -> "pb.ReloadPolicyReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.ReloadPolicyRequest(dry_run=dry_run)
        reply: pb.ReloadPolicyReply = self._call("ReloadPolicy", asked, Door.ADMIN)
        return reply

    # --- the wire

    def list_mps(self) -> "pb.ListMpsReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListMpsReply = self._call("ListMps", pb.ListMpsRequest())
        return reply

    def terminate_mps_client(self, device_uuid: str, pid: int) -> None:
        """Raises VgpuError: NO_SUCH_DEVICE, NO_SUCH_CLIENT, MPS_REFUSED."""
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.TerminateMpsClientRequest(device_uuid=device_uuid, pid=pid)
        self._call("TerminateMpsClient", asked, Door.ADMIN)

    def drain_device(
        self, device_uuid: str, undrain: bool = False, move: bool = False
    ) -> "pb.DrainDeviceReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        asked = pb.DrainDeviceRequest(device_uuid=device_uuid, undrain=undrain, move=move)
        reply: pb.DrainDeviceReply = self._call("DrainDevice", asked, Door.ADMIN)
        return reply

    def list_mig(self) -> "pb.ListMigReply":
        from vgpud.api.gen import vgpud_pb2 as pb

        reply: pb.ListMigReply = self._call("ListMig", pb.ListMigRequest())
        return reply

    def plan_mig(self, request: "pb.MigRequest") -> "pb.MigPlanReply":
        """What `apply_mig` would do now; a refusal is part of the reply."""
        reply: pb.MigPlanReply = self._call("PlanMig", request)
        return reply

    def apply_mig(self, request: "pb.MigRequest") -> "pb.MigPlanReply":
        """What was done. The daemon goes on with it if this call is cut short."""
        reply: pb.MigPlanReply = self._call("ApplyMig", request, Door.ADMIN)
        return reply

    def _call(self, method: str, request: Any, door: Door = Door.READ) -> Any:  # noqa: ANN401 (a stub's)
        socket = usable_socket(self._named, door)
        _quiet_grpc()
        import grpc

        from vgpud.api.status import from_rpc_error

        try:
            return getattr(self._stub(socket), method)(request, timeout=self._timeout_seconds)
        except grpc.RpcError as failure:
            raise from_rpc_error(failure, socket, self._timeout_seconds) from None

    def _stub(self, socket: Path) -> "VgpudStub":
        known = self._channels.get(socket)
        if known is None:
            import grpc

            from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub

            channel = grpc.insecure_channel(f"unix:{quote(str(socket.absolute()))}", options=_OPTIONS)
            known = self._channels[socket] = (channel, VgpudStub(channel))
        return known[1]
