"""The gRPC services for the kubelet: registration of the driver, and preparation of claims.

One socket is for the registration, and one for the calls of v1 and v1beta1. Each claim of a call succeeds or
fails by itself. Calls are idempotent.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from vgpud.api.gen.kubelet import dra_health_pb2, dra_v1_pb2, dra_v1beta1_pb2
from vgpud.api.gen.kubelet import pluginregistration_v1_pb2 as registration
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.serve.dra.prepared import Answer
from vgpud.serve.dra.slices import DRIVER
from vgpud.serve.kubelet import wire

log = structlog.get_logger(__name__)

# Versions of the plugin API, the newest first; the kubelet chooses one. The kubelet's names for the
# services differ from those on the wire.
VERSIONS = {"v1.DRAPlugin": dra_v1_pb2, "v1beta1.DRAPlugin": dra_v1beta1_pb2}


# interval of health reports; the kubelet counts a device without a report for 30 s as unknown
_HEALTH_SECONDS = 5.0
_HEALTH_SERVICES = ("v1alpha1.DRAResourceHealth", "v1beta1.DRAResourceHealth")


@dataclass(frozen=True, slots=True)
class Wellness:
    """The health of one published device. If it is not healthy, `why` is the reason."""

    pool: str
    device: str
    well: bool
    why: str = ""


class Behind(Protocol):
    """The object behind the plugin, which serves claims. Both methods raise VgpuError, and are idempotent."""

    async def prepare(self, namespace: str, name: str, uid: str) -> tuple[Answer, ...]: ...

    async def unprepare(self, uid: str) -> None: ...


class DraPlugin:
    """The DRA plugin. `kubelet` is the kubelet's root folder. `registered` is called when the kubelet has
    accepted the driver.
    """

    def __init__(
        self,
        kubelet: Path,
        behind: Behind,
        registered: Callable[[], None],
        health: Callable[[], tuple[Wellness, ...]],
    ) -> None:
        self.registrar = kubelet / "plugins_registry" / f"{DRIVER}-reg.sock"
        self.socket = kubelet / "plugins" / DRIVER / "dra.sock"
        self._behind = behind
        self._registered = registered
        self._health = health
        self._servers: list[grpc.aio.Server] = []

    @property
    def serving(self) -> bool:
        return bool(self._servers) and self.socket.exists() and self.registrar.exists()

    async def start(self) -> None:
        """Serves both sockets. Raises VgpuError(BAD_SETTING) if they cannot be made."""
        await self.stop()
        try:
            self.socket.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise VgpuError(
                ErrorCode.BAD_SETTING,
                f"cannot make {self.socket.parent}: {error.strerror}",
                "see configs/kubernetes/vgpud.service.d, and VGPUD_KUBELET_DIR",
            ) from None
        calls = wire.server()
        for version in VERSIONS.values():
            service = version.DESCRIPTOR.services_by_name["DRAPlugin"].full_name
            calls.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, self._calls(version)),)
            )
        watch: Any = grpc.unary_stream_rpc_method_handler(
            self._watch_health,
            request_deserializer=dra_health_pb2.NodeWatchResourcesRequest.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for service in _HEALTH_SERVICES:
            handlers: dict[str, Any] = {"NodeWatchResources": watch}
            calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        wire.bind(calls, self.socket)
        # The server is recorded before its start, because a server whose start is cancelled must be stopped
        # too.
        self._servers.append(calls)
        await calls.start()
        # The registration starts last, because the kubelet calls the plugin as soon as it sees the
        # registration socket.
        registrar = wire.server()
        handlers = {
            "GetInfo": wire.answering("GetInfo", registration.InfoRequest, self._info),
            "NotifyRegistrationStatus": wire.answering(
                "NotifyRegistrationStatus", registration.RegistrationStatus, self._status
            ),
        }
        registrar.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pluginregistration.Registration", handlers),)
        )
        wire.bind(registrar, self.registrar)
        self._servers.append(registrar)
        await registrar.start()

    async def stop(self) -> None:
        while self._servers:
            await self._servers.pop().stop(0)

    # --- registration with the kubelet

    async def _info(self, _: registration.InfoRequest) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self.socket), supported_versions=list(VERSIONS)
        )

    async def _status(self, told: registration.RegistrationStatus) -> registration.RegistrationStatusResponse:
        if told.plugin_registered:
            log.info(LogEvent.REGISTERED_WITH_KUBELET, driver=DRIVER)
            self._registered()
        else:
            log.error(LogEvent.KUBELET_REJECTED_DRA_DRIVER, driver=DRIVER, why=told.error)
        return registration.RegistrationStatusResponse()

    # --- health of devices

    async def _watch_health(
        self, _: dra_health_pb2.NodeWatchResourcesRequest, context: wire.Context
    ) -> AsyncIterator[dra_health_pb2.NodeWatchResourcesResponse]:
        while True:
            yield health_of(self._health(), int(time.time()))
            await asyncio.sleep(_HEALTH_SECONDS)

    # --- calls for claims

    def _calls(self, version: Any) -> dict[str, Any]:  # noqa: ANN401 - one of two generated modules
        async def prepare(asked: Any) -> Any:  # noqa: ANN401
            async def one(claim: Any) -> Any:  # noqa: ANN401
                answers = await self._behind.prepare(claim.namespace, claim.name, claim.uid)
                return version.NodePrepareResourceResponse(
                    devices=[_device(version, answer) for answer in answers]
                )

            return version.NodePrepareResourcesResponse(
                claims=await _each(asked.claims, one, version.NodePrepareResourceResponse)
            )

        async def unprepare(asked: Any) -> Any:  # noqa: ANN401
            async def one(claim: Any) -> Any:  # noqa: ANN401
                await self._behind.unprepare(claim.uid)
                return version.NodeUnprepareResourceResponse()

            return version.NodeUnprepareResourcesResponse(
                claims=await _each(asked.claims, one, version.NodeUnprepareResourceResponse)
            )

        return {
            "NodePrepareResources": wire.answering(
                "NodePrepareResources", version.NodePrepareResourcesRequest, prepare
            ),
            "NodeUnprepareResources": wire.answering(
                "NodeUnprepareResources", version.NodeUnprepareResourcesRequest, unprepare
            ),
        }


def _device(version: Any, answer: Answer) -> Any:  # noqa: ANN401 - of one of two generated modules
    device = version.Device(
        request_names=[answer.request],
        pool_name=answer.pool,
        device_name=answer.device,
        cdi_device_ids=answer.cdi,
    )
    if answer.share and version is dra_v1_pb2:
        device.share_id = answer.share
    return device


def health_of(devices: Iterable[Wellness], now_seconds: int) -> dra_health_pb2.NodeWatchResourcesResponse:
    return dra_health_pb2.NodeWatchResourcesResponse(
        devices=[
            dra_health_pb2.DeviceHealth(
                device=dra_health_pb2.DeviceIdentifier(pool_name=one.pool, device_name=one.device),
                health=dra_health_pb2.HEALTHY if one.well else dra_health_pb2.UNHEALTHY,
                last_updated_time=now_seconds,
                message=one.why,
            )
            for one in devices
        ]
    )


async def _each(claims: Any, work: Callable[[Any], Awaitable[Any]], failed: Any) -> dict[str, Any]:  # noqa: ANN401
    """Does `work` for each claim. Returns the answers by the claim's uid; for a failed claim, the error as
    text.
    """

    async def one(claim: Any) -> Any:  # noqa: ANN401
        try:
            return await work(claim)
        except VgpuError as error:
            log.warning(
                LogEvent.CLAIM_NOT_PREPARED_OR_NOT_RELEASED,
                claim=f"{claim.namespace}/{claim.name}",
                claim_uid=claim.uid,
                why=str(error),
            )
            return failed(error=wire.words(error))
        except Exception:
            name = f"{claim.namespace}/{claim.name}"
            log.exception(LogEvent.BUG_IN_DRA_CLAIM_CALL, claim=name, claim_uid=claim.uid)
            return failed(
                error="a bug in vgpud made this claim fail (E901); report it with the journal of vgpud"
            )

    by_uid = {claim.uid: claim for claim in claims}
    answers = await asyncio.gather(*(one(claim) for claim in by_uid.values()))
    return dict(zip(by_uid, answers, strict=True))
