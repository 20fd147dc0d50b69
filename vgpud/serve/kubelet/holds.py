"""Which ids of which resource an allocation stands for: what the kubelet gave out, and to which pod.

Kept in a file beside the ledger, which knows nothing of ids: written whole before an allocation is
made, so that no allocation of the kubelet's is ever without. An entry without an allocation is harmless.
"""

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from vgpud.serve.statefile import read_state, write_state

log = structlog.get_logger(__name__)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """`pod` is "namespace/pod/container" of the first container seen with it, "" before that."""

    request_id: str
    resource: str
    ids: frozenset[str]
    pod: str = ""


class Holds:
    """What changes it raises VgpuError(LEDGER_FAILED) if the file cannot be written; nothing changes then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = _read(path)
        self._writing = asyncio.Lock()

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._held.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    async def put(self, hold: Hold) -> None:
        if self._held.get(hold.request_id) != hold:
            await self._change(hold.request_id, hold)

    async def bind(self, hold: Hold, pod: str) -> Hold:
        """Names the pod, if none was named before."""
        named = hold if hold.pod else replace(hold, pod=pod)
        await self.put(named)
        return named

    async def drop(self, request_id: str) -> None:
        if request_id in self._held:
            await self._change(request_id, None)

    def of(self, resource: str) -> tuple[Hold, ...]:
        return tuple(hold for hold in self._held.values() if hold.resource == resource)

    def overlapping(self, resource: str, ids: Collection[str]) -> tuple[Hold, ...]:
        return tuple(hold for hold in self.of(resource) if not hold.ids.isdisjoint(ids))

    async def _change(self, request_id: str, hold: Hold | None) -> None:
        """A cancelled call leaves a thread that still writes: the change ends before the next one begins."""
        await asyncio.shield(self._write(request_id, hold))

    async def _write(self, request_id: str, hold: Hold | None) -> None:
        async with self._writing:
            held = {name: other for name, other in self._held.items() if name != request_id}
            if hold is not None:
                held[request_id] = hold
            await asyncio.to_thread(self._store, held)
            self._held = held

    def _store(self, held: dict[str, Hold]) -> None:
        write_state(self._path, {"version": _VERSION, "holds": [_plain(hold) for hold in held.values()]})


def _plain(hold: Hold) -> dict[str, Any]:
    return {
        "request_id": hold.request_id,
        "resource": hold.resource,
        "ids": sorted(hold.ids),
        "pod": hold.pod,
    }


def _read(path: Path) -> dict[str, Hold]:
    """A file that cannot be read is as none: PodResources tells again who holds what."""
    try:
        holds = [_hold(entry) for entry in read_state(path, _VERSION).get("holds", ())]
    except (KeyError, TypeError) as error:
        log.warning("cannot read what the kubelet holds, it will be asked", file=str(path), why=str(error))
        return {}
    return {hold.request_id: hold for hold in holds}


def _hold(entry: dict[str, Any]) -> Hold:
    return Hold(
        str(entry["request_id"]),
        str(entry["resource"]),
        frozenset(str(name) for name in entry["ids"]),
        str(entry["pod"]),
    )
