"""Runs the DRA driver: publishes cards to the cluster, and serves the kubelet's calls for claims."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import structlog

from vgpud.model.device import Health
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.rows import Rows
from vgpud.node.keeper import NodeKeeper
from vgpud.node.room import Room
from vgpud.serve.doors import run_all, set_at_changes, until_changed
from vgpud.serve.dra.api import Api
from vgpud.serve.dra.cards import Target, cards_of, names_of, target_of
from vgpud.serve.dra.monitors import Monitors
from vgpud.serve.dra.plugin import DraPlugin, Wellness
from vgpud.serve.dra.prepared import PreparedClaims
from vgpud.serve.dra.preparer import Preparer
from vgpud.serve.dra.publisher import Publisher
from vgpud.serve.dra.slices import Cluster, Json, Node, specs
from vgpud.serve.kubelet.plugin import KUBELET_SOCKET
from vgpud.serve.kubelet.pods import Pods

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals of the driver in seconds. Tests use shorter ones."""

    # interval between checks of the plugin's sockets, and pause before lost events are watched again
    look: float = 1.0
    # wait between a change and the publication of slices, because further changes may follow
    settle: float = 1.0
    retry: float = 5.0  # wait after a failure of the API server


class DraDoor:
    """The DRA driver. `run` serves until it is cancelled. It waits until the policy enables DRA."""

    def __init__(
        self,
        keeper: NodeKeeper,
        room: Room,
        kubelet: Path,
        claims: Rows,
        api: Api,
        node: str,
        monitors: Monitors,
        pace: Pace | None = None,
    ) -> None:
        self._keeper = keeper
        self._room = room
        self._node = node
        self._pace = pace or Pace()
        self._dirty = asyncio.Event()
        self._complained = ""
        self.preparer = Preparer(keeper, api, PreparedClaims(claims), node, self._find, monitors)
        self.plugin = DraPlugin(kubelet, self.preparer, self._registered, self._health)
        self._kubelet = kubelet
        self._pods = Pods(kubelet / "pod-resources" / KUBELET_SOCKET)
        self._publisher = Publisher(api, node, self._dirty.set)
        self._published = False

    async def run(self) -> None:
        work = (self._listen, self._publish, self._serve, self._check, self._tell)
        try:
            await run_all(work, self._pace.retry)
        finally:
            self._publisher.close()
            await self.plugin.stop()

    @property
    def _enabled(self) -> bool:
        return self._keeper.policies.policy.dra.enabled

    def _find(self, name: str) -> Target | None:
        return target_of(name, self._room.devices, self._keeper.policies.policy, self._room.places)

    def _health(self) -> tuple[Wellness, ...]:
        policy = self._keeper.policies.policy
        return tuple(
            Wellness(self._node, name, device.health is Health.OK, device.health_reason)
            for device in self._room.devices
            for name in names_of(device, policy, self._room.places)
        )

    # --- publishing cards to the cluster

    async def _listen(self) -> None:
        await set_at_changes(self._keeper, self._dirty, self._pace.look)

    async def _publish(self) -> None:
        while True:
            self._dirty.clear()
            wait = self._keeper.policies.policy.dra.check_seconds
            try:
                await self._publish_once()
                self._complained = ""
            except VgpuError as error:
                self._complain(LogEvent.RESOURCE_SLICES_NOT_PUBLISHED, error)
                wait = self._pace.retry
            await until_changed(self._dirty, wait, self._pace.settle)

    async def _publish_once(self) -> None:
        """Publishes the slices once, or withdraws them. Raises VgpuError."""
        if not self._enabled:
            if self._published:
                await self._publisher.withdraw()
                self._published = False
            return
        views, _ = await self._keeper.listings.devices()
        closed = frozenset(view.device.uuid for view in views if view.drained)
        described = self._keeper.listings.describe().node
        node = Node(self._node, described.driver_version, described.cuda_version)
        allocations = tuple(self._keeper.book)
        cards = cards_of(
            self._room.devices, self._keeper.policies.policy, self._room.places, allocations, closed
        )

        def build(cluster: Cluster) -> tuple[Json, ...]:
            return specs(node, cards, cluster, cores=True)

        self._published = True
        await self._publisher.publish(build)

    # --- serving the kubelet

    def _registered(self) -> None:
        """Called when a kubelet has registered the plugin. The API server's features are asked for again,
        because the kubelet and the cluster may have another version now.
        """
        self._publisher.ask_anew()
        self.preparer.ask_anew()
        self._dirty.set()

    async def _serve(self) -> None:
        """Starts the plugin when DRA is enabled and the kubelet's folder exists, and again when its sockets
        are gone. Stops it when DRA is disabled.
        """
        while True:
            if self._enabled and (self._kubelet / "plugins_registry").is_dir():
                if not self.plugin.serving:
                    try:
                        await self.plugin.start()
                    except VgpuError as error:
                        self._complain(LogEvent.DRA_PLUGIN_NOT_STARTED, error)
            elif not self._enabled:
                await self.plugin.stop()
            await asyncio.sleep(self._pace.look)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._keeper.policies.policy.dra.check_seconds)
            if self._enabled:
                await self.preparer.check()
                await self._name()

    async def _tell(self) -> None:
        while True:
            uid = await self.preparer.prepared.get()
            try:
                await self.preparer.tell(uid)
            except VgpuError as error:  # the next check writes it
                log.debug(LogEvent.CLAIM_STATUS_NOT_WRITTEN, claim_uid=uid, why=str(error))

    async def _name(self) -> None:
        listed = await self._pods.list()
        if listed is not None:
            try:
                await self.preparer.name(listed)
            except VgpuError as error:
                self._complain(LogEvent.CLAIM_PODS_NOT_RECORDED, error)

    def _complain(self, event: LogEvent, error: VgpuError) -> None:
        """Logs a failure unless the last one logged had the same reason."""
        if self._complained != str(error):
            self._complained = str(error)
            log.warning(event, why=str(error), hint=error.hint)
