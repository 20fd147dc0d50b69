"""Tracks the containers in the kubelet's allocations by their init processes, which the hooks of the CDI
specs report.

The kubelet does not report that a container starts or ends. One allocation serves several containers in turn:
a pod's init container, the containers after it, and each restart of a container.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from vgpud.model.log_event import LogEvent
from vgpud.model.tenancy import Lifetime
from vgpud.node.tenants.lifetimes import Lifetimes
from vgpud.serve.statefile import read_state, write_state

log = structlog.get_logger(__name__)

_VERSION = 1
_Init = tuple[int, int]  # an init process: pid and start time (proc(5), field 22)


class Started:
    """The init processes by the allocation's request id. They are kept in a file, because containers outlive
    vgpud.

    `ended` is called when a container has ended. Records of another boot than `boot_id` are ignored.
    """

    def __init__(self, path: Path, boot_id: str, ended: Callable[[], None]) -> None:
        self._path = path
        self._boot_id = boot_id
        self._ended = ended
        self._inits = _read(path, boot_id)
        self._watched: dict[str, tuple[str, _Init]] = {}
        self._lifetimes = Lifetimes(self._end)
        self._writing = asyncio.Lock()

    def watch(self) -> None:
        """Watches the recorded processes after the start of vgpud. Each of them may have ended meanwhile."""
        for request_id, inits in self._inits.items():
            for init in inits:
                self._watch(request_id, init)

    def close(self) -> None:
        self._lifetimes.close()
        self._watched.clear()

    def began(self, request_id: str) -> bool:
        """True if a container of the allocation has started in this boot."""
        return request_id in self._inits

    def runs(self, request_id: str) -> bool:
        return bool(self._inits.get(request_id))

    async def add(self, request_id: str, init: Lifetime) -> None:
        """Records an init process durably. Raises VgpuError(LEDGER_FAILED)."""
        one = (init.pid, init.start_ticks)

        def added() -> dict[str, frozenset[_Init]]:
            return {**self._inits, request_id: self._inits.get(request_id, frozenset()) | {one}}

        async with self._writing:
            await asyncio.to_thread(self._store, added())
            self._inits = added()  # computed again, because containers may have ended during the write
        self._watch(request_id, one)

    async def forget(self, request_id: str) -> None:
        """Forgets the init processes of a released allocation. Raises VgpuError(LEDGER_FAILED)."""
        if request_id in self._inits:
            async with self._writing:
                inits = {name: one for name, one in self._inits.items() if name != request_id}
                await asyncio.to_thread(self._store, inits)
                self._inits = {name: one for name, one in self._inits.items() if name != request_id}

    def _watch(self, request_id: str, init: _Init) -> None:
        key = f"{request_id} {init[0]} {init[1]}"
        self._watched[key] = (request_id, init)
        self._lifetimes.watch(key, Lifetime(*init))

    def _end(self, key: str) -> None:
        """Handles the end of a container. The file keeps the record, because after a restart the process is
        found to have ended again.
        """
        request_id, init = self._watched.pop(key, ("", (0, 0)))
        if request_id in self._inits:
            self._inits = {**self._inits, request_id: self._inits[request_id] - {init}}
        self._ended()

    def _store(self, inits: dict[str, frozenset[_Init]]) -> None:
        entries: dict[str, Any] = {name: sorted(of) for name, of in inits.items()}
        write_state(self._path, {"version": _VERSION, "boot_id": self._boot_id, "inits": entries})


def _read(path: Path, boot_id: str) -> dict[str, frozenset[_Init]]:
    """The records in the file; none if it cannot be read. (PodResources then shows which pods have ended.)"""
    body = read_state(path, _VERSION)
    try:
        if body.get("boot_id") != boot_id:
            return {}
        return {
            str(name): frozenset((int(pid), int(ticks)) for pid, ticks in of)
            for name, of in body["inits"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.warning(LogEvent.STARTED_CONTAINERS_UNREADABLE, file=str(path), why=str(error))
        return {}
