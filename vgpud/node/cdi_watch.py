"""Keeps the CDI specs current while the daemon runs, because a container with a stale spec gets wrong devices
or files, and a container with none gets an error.

No event tells vgpud that a spec is stale: an upgrade writes files, the driver's tables are in /proc, and
another program may empty /var/run/cdi. So a few files are checked every 0.8 seconds. A check costs 60
microseconds when warm, and 0.2 ms with 56 MIG instances. After the start, specs are written only after a
change.
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import structlog

from vgpud import audit
from vgpud.inject.driver import driver_mark, find_driver
from vgpud.model.device import Node
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Slice, State
from vgpud.node.keeper import NodeKeeper
from vgpud.node.recover import repair

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.8
_HAVE_SPECS = (State.ACTIVE, State.RESIZING, State.SUSPENDED, State.FAILED)


class _Mark(NamedTuple):
    """The facts on which specs depend. Two marks are equal if nothing has changed between them."""

    driver: tuple[object, ...]  # identifies the driver's files
    numbers: bytes  # major numbers of the device nodes
    instances: tuple[str, ...]  # paths of MIG's capabilities
    folder: int | None  # time at which an entry was last added to or removed from the CDI folder


class CdiWatch:
    def __init__(self, keeper: NodeKeeper) -> None:
        self._keeper = keeper
        self._context = keeper.context
        self._host_root = keeper.context.host_root

    async def run(self) -> None:
        """Checks the specs until the daemon stops."""
        seen: _Mark | None = None
        while True:
            now = self._look()
            if now != seen:
                try:
                    await (self._begin() if seen is None else self._renew(seen, now))
                    seen = now
                except VgpuError as error:  # the next round tries again
                    log.error(LogEvent.CDI_SPECS_NOT_REWRITTEN, why=str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _begin(self) -> None:
        """Writes all specs anew and removes orphans, because all may have changed while vgpud was down."""
        await self._rewrite()
        await self._tidy()

    def _look(self) -> _Mark:
        proc = self._host_root / "proc"
        try:
            numbers = (proc / "devices").read_bytes()
        except OSError:
            numbers = b""
        try:
            changed = self._context.specs.folder.stat().st_mtime_ns
        except OSError:
            changed = None
        return _Mark(
            driver_mark(self._host_root),
            numbers,
            _instances(proc / "driver/nvidia/capabilities"),
            changed,
        )

    async def _renew(self, seen: _Mark, now: _Mark) -> None:
        if now.driver != seen.driver:
            self._context.specs.driver = await asyncio.to_thread(find_driver, self._host_root)
            log.info(LogEvent.DRIVER_FILES_CHANGED_REWRITING_CDI_SPECS)
        # If an allocation's MIG instance was made and destroyed between two checks, the paths are equal, so a
        # missing path counts too.
        moved = now.instances != seen.instances or self._lacks_nodes(now.instances)
        if moved or now[:2] != seen[:2]:
            await self._context.inventory.refresh()
        if now.numbers != seen.numbers:
            await self._repair(self._held())
        elif moved:
            await self._repair(await self._moved())
        if now.driver != seen.driver:
            await self._rewrite()
        await self._tidy()

    def _held(self) -> tuple[str, ...]:
        """Ids of the allocations that should have a spec and that no operation is changing."""
        busy = self._keeper.busy()
        return tuple(a.id for a in self._context.book if a.state in _HAVE_SPECS and a.id not in busy)

    def _lacks_nodes(self, instances: tuple[str, ...]) -> bool:
        """True if a MIG instance of an allocation has no path in /proc/driver/nvidia/capabilities."""
        ends = {path.rpartition("/capabilities/")[2] for path in instances}
        held = (part for name in self._held() for part in self._context.book.get(name).slices)
        return any(_capability(part, self._context.inventory.node) not in ends for part in held if part.mig)

    async def _moved(self) -> tuple[str, ...]:
        """Ids of the allocations whose MIG instances no longer exist, or whose edits are out of date
        (MigLayouts.stale).
        """
        if self._keeper.mig is None:
            return ()
        changed = set(await self._keeper.mig.stale())
        changed |= {a.id for a in self._context.book if any(map(self._is_missing, a.slices))}
        return tuple(name for name in self._held() if name in changed)

    def _is_missing(self, part: Slice) -> bool:
        device = self._context.inventory.node.device(part.device_uuid)
        if part.mig is None or device is None or not device.health.answers:
            return False
        key, place = part.mig.place
        there = next((one for one in device.mig.instances if one.key == key), None)
        if there is None or not there.compute_instances:
            return True
        return place is not None and there.compute(place) is None

    async def _repair(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                with audit.because("the driver's nodes are other ones now"):
                    await repair(self._keeper, name)
            except VgpuError as error:  # the allocation may have been released meanwhile, or be changing
                log.error(LogEvent.CDI_SPEC_NOT_REWRITTEN, allocation=name, why=str(error))

    async def _tidy(self) -> None:
        """Removes specs without an allocation, and writes missing ones. Allocations that were made or
        released during the listing are left out.
        """
        known = {allocation.id for allocation in self._context.book}
        held = self._held()
        there = await self._context.specs.list()
        for name in there - known:
            if name not in self._context.book:
                await self._context.specs.remove(name)
                log.warning(LogEvent.ORPHANED_CDI_SPEC_REMOVED, allocation=name)
        for name in held:
            if name not in there and name in self._held():
                await self._context.specs.write(self._context.book.get(name))
                log.warning(LogEvent.MISSING_CDI_SPEC_REWRITTEN, allocation=name)

    async def _rewrite(self) -> None:
        for name in self._held():
            held = self._context.book.get(name) if name in self._context.book else None
            # A release removes the allocation's spec only once. If a release began meanwhile, no spec is
            # written.
            if held is not None and held.state in _HAVE_SPECS:
                await self._context.specs.write(held)


def _instances(capabilities: Path) -> tuple[str, ...]:
    """The paths gpu*/mig/gi* and gpu*/mig/gi*/ci*. Two calls of glob() would take three times as long as
    these loops.
    """
    found = []
    for gpu in _below(str(capabilities), "gpu"):
        for instance in _below(f"{gpu}/mig", "gi"):
            found += [instance, *_below(instance, "ci")]
    return tuple(sorted(found))


def _below(folder: str, prefix: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.name.startswith(prefix)]
    except OSError:
        return []


def _capability(part: Slice, node: Node) -> str:
    """The path of the slice's MIG capability below /proc/driver/nvidia/capabilities."""
    device = node.device(part.device_uuid)
    assert part.mig is not None
    minor = None if device is None else device.minor
    return f"gpu{minor}/mig/gi{part.mig.gpu_instance_id}/ci{part.mig.compute_instance_id}"
