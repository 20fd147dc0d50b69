"""Runs vgpud's device plugins: the resources of the policy, and the free units of each.

A starting kubelet empties its folder and forgets its plugins; a new kubelet.sock shows that. The folder is
polled, because it may be removed and made again, and on many nodes it never exists.
"""

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import structlog

from vgpud import clock
from vgpud.inject.driver import DriverFiles
from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.rows import Rows
from vgpud.model.tenancy import Allocation
from vgpud.node.keeper import NodeKeeper
from vgpud.node.room import Room
from vgpud.policy.kubelet import KubeletSettings
from vgpud.serve.doors import run_all, set_at_changes, until_changed
from vgpud.serve.kubelet.allocator import Allocator
from vgpud.serve.kubelet.holds import Holds
from vgpud.serve.kubelet.plugin import KUBELET_SOCKET, Plugin
from vgpud.serve.kubelet.pods import Life, Pods, life_of
from vgpud.serve.kubelet.prefer import preferred
from vgpud.serve.kubelet.resources import (
    Resource,
    Share,
    from_one_card,
    offered,
    one_of,
    resources_of,
    shares,
    unit_bytes,
)
from vgpud.serve.kubelet.started import Started

log = structlog.get_logger(__name__)

_NAME_CHARACTERS = 40  # maximum length of a socket's name; the whole path has at most 107 bytes


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals of the device plugins in seconds. Tests use shorter ones."""

    look: float = 1.0  # interval between checks of the kubelet's socket
    # interval between checks of the socket while no plugin is registered: after a reboot the kubelet admits
    # its pods within a second of its start, and refuses those whose plugin is not registered
    unregistered: float = 0.1
    settle: float = 0.05  # wait between a change and the new list, because further changes may follow
    # time after which a registration is repeated if the kubelet has not called ListAndWatch
    unwatched: float = 10.0
    retry: float = 5.0  # wait after a refusal by the kubelet
    settled: float = 60.0  # time after the kubelet's start from which its list of pods counts as complete
    # interval between checks while a pod whose containers have ended may leave the list, or an admitted one
    # may appear in it
    often: float = 0.25
    # how long checks at the interval `often` go on: a pod may also restart its containers
    often_for: float = 30.0


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The sockets of a kubelet with this root folder (--root-dir).

    `plugins` is a constant of the kubelet, independent of its root folder (kubernetes/kubernetes,
    staging/src/k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/constants.go).
    """

    root: Path
    plugins: Path
    node_name: str = ""

    @property
    def socket(self) -> Path:
        return self.plugins / KUBELET_SOCKET

    @property
    def pod_resources(self) -> Path:
        return self.root / "pod-resources" / KUBELET_SOCKET

    def life(self) -> Life | None:
        """A value that identifies the kubelet process by its socket; None if the socket does not exist."""
        return life_of(self.socket)

    def age_seconds(self) -> float:
        """The time since the kubelet bound the last of its two sockets; 0 if one of them does not exist."""
        try:
            bound = max(one.stat().st_mtime for one in (self.socket, self.pod_resources))
        except OSError:
            return 0.0
        return max(0.0, time.time() - bound)


class KubeletDoor:
    """Runs the device plugins. `run` serves until it is cancelled. It waits until the policy names a
    resource.
    """

    def __init__(
        self,
        keeper: NodeKeeper,
        room: Room,
        kubelet: Kubelet,
        holds: Rows,
        containers: Rows,
        driver: Callable[[], DriverFiles] = DriverFiles,
        pace: Pace | None = None,
        boot_id: str = "",
    ) -> None:
        self._keeper = keeper
        self._driver = driver
        self._room = room
        self._kubelet = kubelet
        self._pace = pace or Pace()
        self._plugins: dict[str, Plugin] = {}
        # Plugins that `_serve` is to stop. It alone starts and stops plugins, so that none is started while
        # it is being stopped.
        self._gone: list[Plugin] = []
        self._dirty = asyncio.Event()
        self._served: tuple[int, int] | None = None
        self._complained: dict[str, str] = {}
        self._retry_at: dict[str, float] = {}
        self._often = asyncio.Event()
        self._often_since = 0.0
        self.allocator = Allocator(
            keeper,
            Holds(holds),
            Pods(kubelet.pod_resources),
            lambda: room.devices,
            self._dirty.set,
            Started(containers, boot_id, self._look_often),
            kubelet.node_name,
        )

    async def run(self) -> None:
        work = (self._listen, self._tell, self._serve, self._check)
        self.allocator.started.watch()
        try:
            await run_all(work, self._pace.retry)
        finally:
            self.allocator.started.close()
            for plugin in (*self._gone, *self._plugins.values()):
                await plugin.stop()

    # --- for the plugins

    @property
    def driver(self) -> DriverFiles | None:
        return None if self._settings.inject == "cdi" else self._driver()

    async def allocate(self, resource: Resource, ids: Sequence[str]) -> Allocation:
        made = await self.allocator.allocate(resource, ids)
        self._look_often()
        return made

    def prefer(
        self, resource: Resource, available: Sequence[str], must: Sequence[str], size: int
    ) -> tuple[str, ...]:
        spread = self._keeper.policies.policy.planner.strategy == "spread"
        devices = self._room.devices
        return preferred(resource, devices, available, must, size, spread, self._room.nearest)

    # --- the lists of ids

    @property
    def _settings(self) -> KubeletSettings:
        return self._keeper.policies.policy.kubelet

    async def _listen(self) -> None:
        await set_at_changes(self._keeper, self._dirty, self._pace.look)

    async def _tell(self) -> None:
        while True:
            self._dirty.clear()
            await self._renew()
            await until_changed(self._dirty, self._settings.check_seconds, self._pace.settle)

    async def _renew(self) -> None:
        """Makes, drops and updates plugins, so that they agree with the policy, the cards and the
        allocations.
        """
        settings = self._settings
        if settings.resource:
            try:
                await self._keeper.listings.devices()  # refreshes the snapshot of the devices
            except VgpuError as error:
                self._complain("devices", str(error))
                return
        devices = self._room.devices
        wanted = {r.name: r for r in resources_of(settings, devices, self._room.profiles)}
        plugins = {}
        for name, resource in wanted.items():
            plugin = self._plugins.get(name)
            if plugin is None or plugin.resource != resource:
                plugin = Plugin(resource, self._kubelet.plugins / socket_name(name), self)
            listed = self._shares(resource, devices)
            if not listed:
                self._say_why(resource, devices)
            # The list is set before the plugin is registered, so that the kubelet gets it at once.
            await plugin.update(listed)
            plugins[name] = plugin
        self._gone += [plugin for name, plugin in self._plugins.items() if plugins.get(name) is not plugin]
        self._plugins = plugins

    def _say_why(self, resource: Resource, devices: Sequence[Device]) -> None:
        matching = [device for device in devices if resource.rule.match.covers(device)]
        why = self._room.refusal(one_of(resource, matching[0])) if matching else None
        words = f"no device of this node matches, of {len(devices)}" if why is None else str(why)
        self._complain(resource.name, f"there will be none of it: {words}")

    def _shares(self, resource: Resource, devices: Sequence[Device]) -> tuple[Share, ...]:
        held, failed = self.allocator.held_ids(resource.name)
        found: list[tuple[Share, ...]] = []
        for device in devices:
            memory = self._room.memory_bytes(device, resource.mode)
            count = offered(resource, device, self._room.profiles(device), memory)
            if count:
                found.append(self._shares_of(resource, device, count, held, failed))
        if self.allocator.scattered.holds(resource.name):
            return from_one_card(found, held)
        return tuple(share for shares in found for share in shares)

    def _shares_of(
        self, resource: Resource, device: Device, count: int, held: Collection[str], failed: Collection[str]
    ) -> tuple[Share, ...]:
        """The ids of a card for a resource. A card that can never serve the resource has none, unless some
        are held.
        """
        one = one_of(resource, device)
        if resource.kind == "memory":
            free = self._room.units(one, device.uuid, unit_bytes(resource, device))
        else:
            free = self._room.more(one, device.uuid, count)
        listed = shares(resource, device, count, free or 0, held, failed)
        if free is None and not any(share.id in held for share in listed):
            return ()
        return listed

    # --- registration and checks

    async def _serve(self) -> None:
        while True:
            while self._gone:
                await self._gone[0].stop()
                del self._gone[0]
            life = self._kubelet.life() if self._plugins else None
            if life != self._served:
                self._served = life
                self._retry_at.clear()
                await self.allocator.kubelet_found()
                self._look_often()  # pods may have ended while no kubelet ran
                for plugin in self._plugins.values():
                    plugin.registered = False
            if life is not None:
                for plugin in tuple(self._plugins.values()):
                    await self._present(plugin)
            waits = self._settings.resource and not any(p.registered for p in self._plugins.values())
            await asyncio.sleep(self._pace.unregistered if waits else self._pace.look)

    async def _present(self, plugin: Plugin) -> None:
        """Serves and registers the plugin; a failure is retried at the next check."""
        name, now = plugin.resource.name, asyncio.get_running_loop().time()
        if plugin.unwatched(self._pace.unwatched):
            log.warning(LogEvent.KUBELET_LOST_PLUGIN_REGISTERING_AGAIN, resource=name)
            plugin.registered = False
        if plugin.registered and plugin.serving:
            return
        if now < self._retry_at.get(name, 0.0):
            return
        try:
            if not plugin.serving:
                await plugin.start()
            await plugin.register(self._kubelet.socket)
        except VgpuError as error:
            self._retry_at[name] = now + self._pace.retry
            self._complain(name, str(error))
        else:
            self._complained.pop(name, None)

    async def _check(self) -> None:
        """Releases allocations without a pod. It does so only while a kubelet runs at which vgpud is
        registered, because the list of another kubelet proves nothing.

        It also runs after the policy's last resource was removed, because running pods keep their
        allocations.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until_the_next_check()):
                    await self._often.wait()
            self._often.clear()
            known = not self._plugins or any(p.registered for p in self._plugins.values())
            life = self._kubelet.life()
            if life is None or not known or (self._plugins and life != self._served):
                continue
            try:
                settled = self._kubelet.age_seconds() >= self._pace.settled
                await self.allocator.check(self._settings.release_seconds, settled)
            except VgpuError as error:
                self._complain("check", str(error))

    def _look_often(self) -> None:
        """Called at an admission, whose pod the kubelet will list, and at a container's end: its pod may soon
        leave the list, or start the container again.
        """
        self._often_since = clock.now()
        self._often.set()

    def _until_the_next_check(self) -> float:
        """Seconds until the next check. They are few while the list of pods will change soon."""
        recent = clock.now() - self._often_since < self._pace.often_for
        soon = recent and self.allocator.waits_for_a_pod()
        return self._pace.often if soon else self._settings.check_seconds

    def _complain(self, about: str, why: str) -> None:
        """Logs a failure, unless the last one about the same had the same reason."""
        if self._complained.get(about) != why:
            self._complained[about] = why
            log.warning(LogEvent.KUBELET_PLUGIN_IMPAIRED, about=about, why=why)


def socket_name(resource: str) -> str:
    """The file name of a resource's socket. It shows the resource's name, and differs from that of every
    other resource.
    """
    plain = re.sub(r"[^A-Za-z0-9.-]", "_", resource)
    if plain == resource and len(plain) <= _NAME_CHARACTERS:
        return f"vgpud-{plain}.sock"
    return f"vgpud-{plain[:_NAME_CHARACTERS]}-{sha256(resource.encode()).hexdigest()[:8]}.sock"
