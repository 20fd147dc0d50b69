"""A double of the kubelet as a device plugin sees it: its sockets, its device manager and its behaviour.

The sources are the published protocol and the kubelet's device manager. At its start the kubelet empties its
folder of plugins. It keeps its own accounts of device ids, in a checkpoint that outlives it. It asks for
preferred ids and mostly uses them, and gives an init container's ids to later containers again. It never says
for which pod it asks, and never reports the end of a pod.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as dp
from vgpud.api.gen.kubelet import podresources_v1_pb2 as pr

PATIENCE_SECONDS = 300.0


def encode(message: Any) -> bytes:
    return bytes(message.SerializeToString())


@dataclass
class Endpoint:
    """A registered device plugin, with the last device list that it sent."""

    resource: str
    channel: grpc.aio.Channel
    devices: dict[str, dp.Device] = field(default_factory=dict)
    lists: int = 0
    ended: bool = False
    watch: asyncio.Task[None] | None = None

    def call(self, method: str, request: Any, reply: Any, **options: Any) -> Any:
        return self.channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=encode,
            response_deserializer=reply.FromString,
        )(request, **options)

    @property
    def healthy(self) -> set[str]:
        return {name for name, device in self.devices.items() if device.health == "Healthy"}


class AdmissionError(Exception):
    """The error that a pod shows as UnexpectedAdmissionError."""


def fixed_plugins(root: Path) -> Path:
    """Returns the folder of device plugins. A kubelet has it at a constant path, whatever its --root-dir, so
    it is not below the root folder.
    """
    return root.parent / "device-plugins"


class Kubelet:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.plugins = fixed_plugins(root)
        self.pod_resources = root / "pod-resources"
        for folder in (self.plugins, self.pod_resources):
            folder.mkdir(parents=True, exist_ok=True)
        self.endpoints: dict[str, Endpoint] = {}
        self.registrations: list[dp.RegisterRequest] = []
        # ids by pod, container and resource, as in the kubelet's checkpoint
        self.held: dict[tuple[str, str, str], set[str]] = {}
        # the claim's name and its CDI devices, by pod and container
        self.claimed: dict[tuple[str, str], tuple[str, list[str]]] = {}
        self.init_containers: set[tuple[str, str]] = set()  # (pod, container); PodResources never lists them
        # The pods that the kubelet has admitted. Each node of a cluster also runs some pods of the system.
        self.active: set[str] = {"kube-system/kube-proxy-x7f2p"}
        self.refuse = ""  # if not empty, the reason with which registrations are refused
        self.listing_fails = False
        # if true, PodResources returns an empty list, as after a start before the pods are known
        self.listing_empty = False
        self.takes_advice = True
        self.listings = 0  # number of PodResources calls
        self._servers: list[grpc.aio.Server] = []
        self._news = asyncio.Condition()

    # --- start and stop

    async def start(self) -> None:
        for entry in self.plugins.iterdir():  # the kubelet empties its folder and forgets its plugins
            entry.unlink()
        register = grpc.unary_unary_rpc_method_handler(
            self._register, dp.RegisterRequest.FromString, response_serializer=encode
        )
        await self.start_listing()
        await self._listen(self.plugins / "kubelet.sock", "v1beta1.Registration", {"Register": register})

    async def start_listing(self) -> None:
        listing = grpc.unary_unary_rpc_method_handler(
            self._list, pr.ListPodResourcesRequest.FromString, response_serializer=encode
        )
        await self._listen(self.pod_resources / "kubelet.sock", "v1.PodResourcesLister", {"List": listing})

    async def _listen(self, path: Path, service: str, methods: dict[str, Any]) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    async def stop(self) -> None:
        for endpoint in self.endpoints.values():
            await self._forget(endpoint)
        self.endpoints = {}
        for server in self._servers:
            await server.stop(0)
        self._servers = []

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def looks_old(self) -> None:
        """Makes the kubelet's sockets old. vgpud trusts the pod list of a kubelet that started long ago."""
        for folder in (self.pod_resources, self.plugins):
            os.utime(folder / "kubelet.sock", (0, 0))

    async def remove_folder(self) -> None:
        """Removes the kubelet's folder and starts the kubelet again, as an administrator may do."""
        await self.stop()
        shutil.rmtree(self.plugins)
        await asyncio.sleep(0.1)
        self.plugins.mkdir()
        await self.start()

    async def _forget(self, endpoint: Endpoint) -> None:
        if endpoint.watch is not None:
            endpoint.watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await endpoint.watch
        await endpoint.channel.close()

    # --- services

    async def _register(self, asked: dp.RegisterRequest, context: Any) -> dp.Empty:
        self.registrations.append(asked)
        if self.refuse:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        assert asked.version == "v1beta1"
        assert "/" not in asked.endpoint
        old = self.endpoints.pop(asked.resource_name, None)
        if old is not None:
            await self._forget(old)
        channel = grpc.aio.insecure_channel(f"unix:{self.plugins / asked.endpoint}")
        endpoint = Endpoint(asked.resource_name, channel)
        # the kubelet connects to the plugin and asks for its options before it answers the registration
        options = await endpoint.call("GetDevicePluginOptions", dp.Empty(), dp.DevicePluginOptions)
        assert options == asked.options
        endpoint.watch = asyncio.ensure_future(self.watch(endpoint))
        self.endpoints[asked.resource_name] = endpoint
        return dp.Empty()

    async def watch(self, endpoint: Endpoint) -> None:
        stream = endpoint.channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=encode,
            response_deserializer=dp.ListAndWatchResponse.FromString,
        )(dp.Empty())
        try:
            async for reply in stream:
                endpoint.devices = {device.ID: device for device in reply.devices}
                endpoint.lists += 1
                async with self._news:
                    self._news.notify_all()
        except grpc.aio.AioRpcError:
            endpoint.ended = True
            for device in endpoint.devices.values():
                device.health = "Unhealthy"
        async with self._news:
            self._news.notify_all()

    async def _list(self, _: Any, context: Any) -> pr.ListPodResourcesResponse:
        if self.listing_fails:
            await context.abort(grpc.StatusCode.INTERNAL, "not today")
        self.listings += 1
        pods: dict[str, pr.PodResources] = {}
        for pod in () if self.listing_empty else sorted(self.active):
            namespace, name = pod.split("/")
            pods[pod] = pr.PodResources(name=name, namespace=namespace)
        for (pod, container, resource), ids in self.held.items():
            if pod not in pods or (pod, container) in self.init_containers:
                continue
            told = pods[pod]
            one = told.containers.add(name=container)
            # if the plugin asks for NUMA nodes, PodResources has one entry for each of them
            for name in sorted(ids):
                one.devices.add(resource_name=resource, device_ids=[name])
        for (pod, container), (claim, cdi_names) in self.claimed.items():
            if pod in pods:
                told = pods[pod]
                dynamic = told.containers.add(name=container).dynamic_resources.add(
                    claim_name=claim, claim_namespace=told.namespace
                )
                for cdi_name in cdi_names:
                    dynamic.claim_resources.add().cdi_devices.add(name=cdi_name)
        return pr.ListPodResourcesResponse(pod_resources=pods.values())

    # --- device manager

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with self._news, asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.05)

    async def healthy(self, resource: str, count: int) -> set[str]:
        """Waits until `count` ids of a resource are healthy."""
        await self.wait(lambda: resource in self.endpoints and self._count(resource) == count)
        return self.endpoints[resource].healthy

    def _count(self, resource: str) -> int:
        return len(self.endpoints[resource].healthy)

    def in_use(self, resource: str) -> set[str]:
        return {name for (_, _, of), ids in self.held.items() if of == resource for name in ids}

    async def admit(
        self,
        pod: str,
        resource: str,
        count: int,
        container: str = "main",
        reusable: Collection[str] = (),
        among: Callable[[str], bool] = lambda _: True,
        init: bool = False,
    ) -> dp.ContainerAllocateResponse:
        """Gives a container of a pod `count` ids. Raises AdmissionError with the plugin's message. From then
        on PodResources lists the pod, but never its plain `init` containers.
        """
        self.active.add(pod)
        if init:
            self.init_containers.add((pod, container))
        endpoint = self._endpoint(resource)
        taken = self.in_use(resource) - set(reusable)
        free = sorted(name for name in endpoint.healthy - taken if among(name))
        if len(free) < count:
            raise AdmissionError(f"requested {count}, available {len(free)}")
        chosen = sorted(reusable)[:count]
        if self.takes_advice and len(chosen) < count:
            asked = dp.PreferredAllocationRequest()
            asked.container_requests.add(
                available_deviceIDs=free, must_include_deviceIDs=chosen, allocation_size=count
            )
            advice = await self._call(
                endpoint, "GetPreferredAllocation", asked, dp.PreferredAllocationResponse
            )
            advised = [n for n in advice.container_responses[0].deviceIDs if n in free and n not in chosen]
            chosen += advised[: count - len(chosen)]
        chosen += [name for name in free if name not in chosen][: count - len(chosen)]
        answer = await self.allocate(resource, chosen)
        self.held[pod, container, resource] = set(chosen)
        return answer

    async def allocate(self, resource: str, ids: Collection[str]) -> dp.ContainerAllocateResponse:
        request = dp.AllocateRequest()
        request.container_requests.add(devices_ids=ids)
        reply = await self._call(self._endpoint(resource), "Allocate", request, dp.AllocateResponse)
        (answer,) = reply.container_responses
        assert isinstance(answer, dp.ContainerAllocateResponse)
        return answer

    def _endpoint(self, resource: str) -> Endpoint:
        if resource not in self.endpoints:
            raise AdmissionError(f"no plugin is registered for {resource}")
        return self.endpoints[resource]

    async def _call(self, endpoint: Endpoint, method: str, request: Any, reply: Any) -> Any:
        try:
            return await endpoint.call(method, request, reply, timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise AdmissionError(error.details()) from None
        except asyncio.CancelledError:
            if self.endpoints.get(endpoint.resource) is endpoint:
                raise
            raise AdmissionError("the plugin registered again during the call") from None

    def end(self, pod: str) -> None:
        """Ends the pod without informing the plugin."""
        self.active.discard(pod)
        self.held = {key: ids for key, ids in self.held.items() if key[0] != pod}


@contextlib.asynccontextmanager
async def kubelet(root: Path) -> AsyncIterator[Kubelet]:
    made = Kubelet(root)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
