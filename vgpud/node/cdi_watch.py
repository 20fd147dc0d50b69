"""Keeps the CDI specs true while the daemon runs: a stale spec is worse than none.

What makes one stale has no event of its own for us (an upgrade writes files, the driver's tables are
in /proc, anybody may empty /var/run/cdi), so a few files are looked at every quarter of a second, which
costs some 50 microseconds; work is done only when they changed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from vgpud.inject.driver import driver_mark, find_driver
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import State
from vgpud.node.keeper import NodeKeeper, Parts
from vgpud.node.recover import repair

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 0.25
_HAVE_SPECS = (State.ACTIVE, State.RESIZING, State.FAILED)


class _Mark(NamedTuple):
    """What a spec depends on; equal while nothing changed."""

    driver: tuple[object, ...]  # the driver's files
    numbers: bytes  # majors of the device nodes
    instances: tuple[str, ...]  # MIG's capability nodes
    folder: int | None  # when an entry of the CDI folder last came or went


class CdiWatch:
    """`agree` makes ledger and world agree, as at a start."""

    def __init__(
        self,
        keeper: NodeKeeper,
        parts: Parts,
        host_root: Path,
        agree: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._keeper = keeper
        self._parts = parts
        self._host_root = host_root
        self._agree = agree

    async def run(self) -> None:
        """For as long as the daemon serves."""
        seen = self._look()
        await self._rewrite()  # what changed while no daemon ran
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = self._look()
            if now == seen:
                continue
            try:
                await self._renew(seen, now)
            except VgpuError as error:
                log.error("CDI specs not renewed", why=str(error))
                continue  # tried again
            seen = now

    def _look(self) -> _Mark:
        proc = self._host_root / "proc"
        try:
            numbers = (proc / "devices").read_bytes()
        except OSError:
            numbers = b""
        capabilities = proc / "driver/nvidia/capabilities"
        try:
            changed = self._parts.specs.folder.stat().st_mtime_ns
        except OSError:
            changed = None
        return _Mark(
            driver_mark(self._host_root),
            numbers,
            tuple(sorted(str(path) for path in capabilities.glob("gpu*/mig/gi*/ci*"))),
            changed,
        )

    async def _renew(self, seen: _Mark, now: _Mark) -> None:
        if now.driver != seen.driver:
            self._parts.specs.driver = await asyncio.to_thread(find_driver, self._host_root)
            log.info("the driver's files changed, CDI specs are written anew")
        await self._parts.inventory.refresh()
        if now.numbers != seen.numbers:
            for name in self._held():
                await repair(self._keeper, self._parts, name)
        if now.driver != seen.driver:
            await self._rewrite()
        if now.instances != seen.instances or self._differs():
            await self._agree()

    def _held(self) -> tuple[str, ...]:
        """Allocations that should have a spec, and that nobody is at work on."""
        busy = self._keeper.busy()
        return tuple(a.id for a in self._parts.book if a.state in _HAVE_SPECS and a.id not in busy)

    def _differs(self) -> bool:
        specs = self._parts.specs.list() - self._keeper.busy()
        return specs != set(self._held())

    async def _rewrite(self) -> None:
        for name in self._held():
            if name in self._parts.book and not self._parts.specs.is_current(self._parts.book.get(name)):
                self._parts.specs.write(self._parts.book.get(name))
            await asyncio.sleep(0)  # ten thousand specs must not hold up an Allocate
