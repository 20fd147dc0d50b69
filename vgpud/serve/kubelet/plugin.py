"""A device plugin for one resource: its socket, its list of ids, and the kubelet's calls."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

import grpc
import structlog

from vgpud import clock
from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as pb
from vgpud.inject.driver import DriverFiles
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Allocation, Edits
from vgpud.serve.kubelet import wire
from vgpud.serve.kubelet.resources import Resource, Share

log = structlog.get_logger(__name__)

VERSION = "v1beta1"
KUBELET_SOCKET = "kubelet.sock"
_SERVICE = "v1beta1.DevicePlugin"
_REGISTER = "/v1beta1.Registration/Register"
_REGISTER_SECONDS = 5.0
_OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True)


class Behind(Protocol):
    """The object behind the plugin, which makes allocations. Both methods raise VgpuError."""

    async def allocate(self, resource: Resource, ids: Sequence[str]) -> Allocation: ...

    def prefer(
        self, resource: Resource, available: Sequence[str], must: Sequence[str], size: int
    ) -> tuple[str, ...]: ...

    @property
    def driver(self) -> DriverFiles | None:
        """The driver's files; None if containers get a CDI name, because its spec has these files."""
        ...


class Plugin:
    """A device plugin. It is started and stopped with the kubelet; its list of ids is kept meanwhile."""

    def __init__(self, resource: Resource, socket: Path, behind: Behind) -> None:
        self.resource = resource
        self.socket = socket
        self._behind = behind
        self._shares: tuple[Share, ...] = ()
        self._changed = asyncio.Condition()
        self._version = 0
        self._server: grpc.aio.Server | None = None
        self._streams = 0
        self._unwatched_since = 0.0
        self.registered = False

    # --- start and stop

    async def start(self) -> None:
        """Serves the socket. Raises VgpuError(BAD_SETTING) if it cannot be made."""
        await self.stop()
        server = wire.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, self._methods()),))
        wire.bind(server, self.socket)
        # The server is recorded before its start, because a server whose start is cancelled must be stopped
        # too.
        self._server = server
        await server.start()

    async def stop(self) -> None:
        """Stops serving. Allocations in progress are completed, but the kubelet gets no further replies."""
        self.registered = False
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def serving(self) -> bool:
        """True if the socket is served. False also if a starting kubelet has removed the socket from its
        folder.
        """
        return self._server is not None and self.socket.exists()

    def unwatched(self, seconds: float) -> bool:
        """Is the plugin registered, but has had no ListAndWatch call for `seconds`? A kubelet that gave up
        does not call again by itself.
        """
        silent = self.registered and not self._streams
        return silent and clock.now() - self._unwatched_since >= seconds

    async def register(self, kubelet: Path) -> None:
        """Registers with the kubelet. Raises VgpuError(UNREACHABLE) with the kubelet's message."""
        asked = pb.RegisterRequest(
            version=VERSION, endpoint=self.socket.name, resource_name=self.resource.name, options=_OPTIONS
        )
        self._unwatched_since = clock.now()
        await wire.ask(kubelet, _REGISTER, asked, pb.Empty, _REGISTER_SECONDS)
        self.registered = True
        log.info(LogEvent.REGISTERED_WITH_KUBELET, resource=self.resource.name, ids=len(self._shares))

    async def update(self, shares: tuple[Share, ...]) -> None:
        """Sends the kubelet a new list of ids, if the list has changed."""
        if shares == self._shares:
            return
        async with self._changed:
            self._shares = shares
            self._version += 1
            self._changed.notify_all()

    # --- calls of the kubelet

    def _methods(self) -> "dict[str, grpc.RpcMethodHandler[object, object]]":
        return {
            "GetDevicePluginOptions": wire.answering("GetDevicePluginOptions", pb.Empty, self._options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            ),
            "GetPreferredAllocation": wire.answering(
                "GetPreferredAllocation", pb.PreferredAllocationRequest, self._prefer
            ),
            "Allocate": wire.answering("Allocate", pb.AllocateRequest, self._allocate),
            "PreStartContainer": wire.answering(
                "PreStartContainer", pb.PreStartContainerRequest, self._pre_start
            ),
        }

    async def _options(self, _: pb.Empty) -> pb.DevicePluginOptions:
        return _OPTIONS

    async def _pre_start(self, _: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()

    async def _list_and_watch(
        self, _: pb.Empty, context: wire.Context
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        self._streams += 1
        sent = -1
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._version != sent)  # noqa: B023
                    sent, shares = self._version, self._shares
                yield listing(shares)
        finally:
            self._streams -= 1
            self._unwatched_since = clock.now()

    async def _prefer(self, asked: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=self._behind.prefer(
                        self.resource,
                        one.available_deviceIDs,
                        one.must_include_deviceIDs,
                        one.allocation_size,
                    )
                )
                for one in asked.container_requests
            ]
        )

    async def _allocate(self, asked: pb.AllocateRequest) -> pb.AllocateResponse:
        answers = []
        for one in asked.container_requests:
            allocation = await self._behind.allocate(self.resource, one.devices_ids)
            answers.append(answer(allocation, self._behind.driver))
        return pb.AllocateResponse(container_responses=answers)


def listing(shares: Sequence[Share]) -> pb.ListAndWatchResponse:
    devices = []
    for share in shares:
        device = pb.Device(ID=share.id, health="Healthy" if share.healthy else "Unhealthy")
        if share.numa_node is not None and share.numa_node >= 0:
            device.topology.nodes.add(ID=share.numa_node)
        devices.append(device)
    return pb.ListAndWatchResponse(devices=devices)


def answer(allocation: Allocation, driver: DriverFiles | None) -> pb.ContainerAllocateResponse:
    """The reply for a container: a CDI name, or the content of that CDI spec. Never both, because a runtime
    would apply the content twice.
    """
    if driver is None:
        return pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=allocation.cdi_name)])
    folder = driver.own_folder
    found = Edits() if folder is None else Edits(env=(("LD_LIBRARY_PATH", str(folder)),))
    return plainly(driver.edits.merged(found).merged(allocation.edits))


def plainly(edits: Edits) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs=dict(edits.env),
        mounts=[
            pb.Mount(container_path=m.container_path, host_path=m.host_path, read_only=m.read_only)
            for m in edits.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=node.path, host_path=node.path, permissions=node.permissions)
            for node in edits.device_nodes
        ],
    )
