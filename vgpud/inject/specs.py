"""Writes the CDI specs of this node. Class Specs has the folder of the specs, and the parts that all specs
share.

Each operation on the folder runs in a thread, because any user can delay it. A user can list the folder with
getdents(2) into a buffer that lies in a file of the user's own file system (FUSE). The kernel locks the
folder until this file system answers.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vgpud.inject import cdi
from vgpud.inject.driver import DriverFiles
from vgpud.inject.hooks import HookProgram
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, DeviceNode
from vgpud.threads import DaemonThreads

T = TypeVar("T")


class Specs:
    """The CDI specs of the node. If the driver changes, `driver` is replaced, and existing specs must be
    written again.

    Calls take effect in their order, one at a time. A call that the kernel does not finish within
    `patience_seconds` raises VgpuError(CDI_FAILED) and can take effect later. Until the kernel finishes it,
    each further call raises at once and changes nothing.
    """

    def __init__(
        self, folder: Path, hook: HookProgram | None = None, driver: DriverFiles | None = None
    ) -> None:
        self.folder = folder
        self.driver = driver or DriverFiles()
        self.patience_seconds = 5.0
        self._hook = hook
        self._turn = asyncio.Lock()
        # the operation on the folder that was started last; it may still run
        self._last: asyncio.Future[Any] | None = None

    @property
    def hook(self) -> HookProgram | None:
        """The hook program; None if it is not installed. Without it, limits reach a container only through
        its environment.
        """
        return self._hook if self._hook is not None and self._hook.exists else None

    async def write(self, allocation: Allocation) -> Path:
        """Writes the allocation's spec if it is not current, and returns its path. Raises
        VgpuError(CDI_FAILED).
        """
        return await self._call(lambda: self._write(allocation))

    def _write(self, allocation: Allocation) -> Path:
        if self.is_current(allocation):
            return cdi.spec_path(self.folder, allocation.id)
        return cdi.write_spec(self.folder, allocation, self.driver, self.hook)

    def is_current(self, allocation: Allocation) -> bool:
        """True if the allocation's spec file has the content that `write` would give it."""
        path = cdi.spec_path(self.folder, allocation.id)
        return cdi.has_text(path, cdi.spec_text(allocation, self.driver, self.hook))

    async def remove(self, allocation_id: str) -> None:
        """Removes the spec of an allocation if it exists. Raises VgpuError(CDI_FAILED) if the file cannot be
        removed.
        """
        await self._call(lambda: cdi.remove_spec(cdi.spec_path(self.folder, allocation_id)))

    async def write_monitors(self, claim: str, devices: Mapping[str, Sequence[DeviceNode]]) -> None:
        """Writes the spec of a claim's monitors if it is not current. Raises VgpuError(CDI_FAILED)."""
        path = cdi.monitor_path(self.folder, claim)
        text = cdi.monitor_text(devices, self.driver, self.hook)
        await self._call(lambda: None if cdi.has_text(path, text) else cdi.write_text(path, text))

    async def remove_monitors(self, claim: str) -> None:
        """Removes the spec of a claim's monitors if it exists. Raises VgpuError(CDI_FAILED)."""
        await self._call(lambda: cdi.remove_spec(cdi.monitor_path(self.folder, claim)))

    async def list(self) -> frozenset[str]:
        """The ids of the allocations that have a spec. Raises VgpuError(CDI_FAILED)."""
        return await self._call(lambda: cdi.list_specs(self.folder))

    async def _call(self, call: Callable[[], T]) -> T:
        async with self._turn:
            if self._last is not None and not self._last.done():
                raise self._too_late()
            running = asyncio.get_running_loop().run_in_executor(DaemonThreads("vgpud-cdi"), call)
            # retrieves the exception of an abandoned call: asyncio logs an exception that is never retrieved
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self._last = running
            await asyncio.wait((running,), timeout=self.patience_seconds)
            if not running.done():
                raise self._too_late()
            return running.result()

    def _too_late(self) -> VgpuError:
        return VgpuError(
            ErrorCode.CDI_FAILED,
            f"the kernel has not finished a change in {self.folder} within {self.patience_seconds:g} s",
            f"a process may hold the folder's lock: end it (fuser {self.folder} lists such), and try again",
        )
