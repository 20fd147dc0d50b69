"""Keeps the node's ResourceSlices in the cluster as they should be: whoever removes or changes them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from vgpud.model.errors import VgpuError
from vgpud.serve.dra.api import Api, is_gone
from vgpud.serve.dra.slices import DRIVER, GROUP, VERSION, Cluster, Json

log = structlog.get_logger(__name__)

_SEPARATE_SINCE = 35  # kubernetes/kubernetes#134189

Build = Callable[[Cluster], tuple[Json, ...]]


class Publisher:
    """`publish` is for one caller at a time."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._cluster: Cluster | None = None
        self._owner: Json | None = None

    async def publish(self, build: Build) -> bool:
        """Makes the cluster have what `build` says, and only that; True if anything was changed.

        Raises VgpuError, also where somebody changed them meanwhile; the next call goes on from there.
        """
        if self._cluster is None:
            self._cluster = Cluster(separate_counters=await self._api.minor() >= _SEPARATE_SINCE)
        changed = await self._make(build(self._cluster))
        while changed:  # what was not kept is left out, and nothing is published that relies on it
            poorer = _poorer(self._cluster, changed)
            if poorer == self._cluster:
                return True
            log.warning(
                "the cluster drops what it was sent: its feature gates are off",
                counters=poorer.keeps_counters,
                sharing=poorer.keeps_sharing,
            )
            self._cluster = poorer
            changed = await self._make(build(poorer))
        return False

    async def withdraw(self) -> None:
        """Takes all of it back."""
        for there in await self._api.slices(DRIVER, self._node):
            await self._delete(there["metadata"]["name"])

    async def _make(self, wanted: Sequence[Json]) -> list[tuple[Json, Json]]:
        """Pairs of what was sent and what was kept; empty if all was as it should be."""
        there = {one["metadata"]["name"]: one for one in await self._api.slices(DRIVER, self._node)}
        names = [f"{self._node}-{DRIVER}-{number}" for number in range(len(wanted))]
        if there.keys() == set(names) and all(
            _same(there[name]["spec"], spec) for name, spec in zip(names, wanted, strict=True)
        ):
            return []
        generation = max((int(one["spec"]["pool"]["generation"]) for one in there.values()), default=0) + 1
        sent = []
        for name, spec in zip(names, wanted, strict=True):
            body = await self._body(name, spec, generation)
            sent.append((body, await self._put(body, there.get(name))))
        for name in there.keys() - set(names):
            await self._delete(name)
        log.info("published", slices=len(wanted), generation=generation)
        return sent

    async def _body(self, name: str, spec: Json, generation: int) -> Json:
        if self._owner is None:  # so that the slices go with the node
            node = await self._api.node(self._node)
            self._owner = {"apiVersion": "v1", "kind": "Node", "name": node["name"], "uid": node["uid"]}
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "ResourceSlice",
            "metadata": {"name": name, "ownerReferences": [{**self._owner, "controller": True}]},
            "spec": {**spec, "pool": {**spec["pool"], "generation": generation}},
        }

    async def _put(self, body: Json, old: Json | None) -> Json:
        if old is None:
            return await self._api.create_slice(body)
        body["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        return await self._api.replace_slice(body)

    async def _delete(self, name: str) -> None:
        try:
            await self._api.delete_slice(name)
        except VgpuError as error:
            if not is_gone(error):
                raise


def _same(there: Json, wanted: Json) -> bool:
    """Whatever the server filled in beside it; the generation says nothing."""
    pool = {key: value for key, value in there["pool"].items() if key != "generation"}
    kept = {key: value for key, value in there.items() if value not in (None, [])}
    return {**kept, "pool": pool} == {key: value for key, value in wanted.items() if value != []}


def _poorer(cluster: Cluster, sent: Sequence[tuple[Json, Json]]) -> Cluster:
    """What the cluster can do, by what it kept."""
    for body, kept in sent:
        if _count(body, "consumesCounters") != _count(kept, "consumesCounters") or (
            len(body["spec"].get("sharedCounters") or ()) != len(kept["spec"].get("sharedCounters") or ())
        ):
            cluster = replace(cluster, keeps_counters=False)
        if _count(body, "allowMultipleAllocations") != _count(kept, "allowMultipleAllocations"):
            cluster = replace(cluster, keeps_sharing=False)
    return cluster


def _count(body: Json, key: str) -> int:
    devices: list[dict[str, Any]] = body["spec"].get("devices") or []
    return sum(bool(device.get(key)) for device in devices)
