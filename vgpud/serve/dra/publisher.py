"""Keeps the node's ResourceSlices in the cluster up to date, even if other programs change or delete them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from vgpud import clock
from vgpud.model.errors import VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.serve.dra.api import Api, Refusal, is_gone
from vgpud.serve.dra.slices import DRIVER, GROUP, VERSION, Cluster, Json

log = structlog.get_logger(__name__)

# first minor version in which counters must be in separate slices (kubernetes/kubernetes#134189)
_SEPARATE_SINCE = 35
# HTTP statuses with which the server refuses a body that it does not support: its version has changed since
# its features were asked for.
_NOT_TAKEN = (400, 422)
# interval of asking for the server's features again, because feature gates and versions change while vgpud
# runs
_ASK_SECONDS = 300.0

Build = Callable[[Cluster], tuple[Json, ...]]


class Publisher:
    """Publishes the node's slices. `changed` is called when another program may have changed them.
    Precondition: only one call of `publish` runs at a time.
    """

    def __init__(
        self, api: Api, node: str, changed: Callable[[], None], ask_seconds: float = _ASK_SECONDS
    ) -> None:
        self._api = api
        self._node = node
        self._changed = changed
        self._ask_seconds = ask_seconds
        self._watch: asyncio.Task[None] | None = None
        # the slices that the cluster has, as long as the watch reports no change
        self._published: Sequence[Json] = ()
        self._complained = ""
        self._asked_at = 0.0
        self._cluster: Cluster | None = None
        self._owner: Json | None = None

    def ask_anew(self) -> None:
        """Makes the next `publish` ask for the API server's features again, because the server may have
        changed.
        """
        self._cluster = None

    async def publish(self, build: Build) -> None:
        """Makes the node's slices in the cluster equal to those that `build` returns. If the server drops
        features, `build` is called again without them.

        Raises VgpuError, also if another writer changed the slices at the same time; the next call then
        continues.
        """
        try:
            await self._publish(build)
        except Refusal as error:
            if error.status in _NOT_TAKEN:
                self.ask_anew()
            raise

    async def _publish(self, build: Build) -> None:
        cluster = await self._able()
        # Features that the server dropped are left out, and devices that need them are not published.
        while (poorer := _poorer(cluster, await self._make(build(cluster)))) != cluster:
            _say(poorer)
            self._cluster = cluster = poorer

    async def _able(self) -> Cluster:
        now = clock.now()
        if self._cluster is None or now - self._asked_at >= self._ask_seconds:
            cluster = await self._ask()
            if cluster != self._cluster:
                _say(cluster)
            self._cluster, self._asked_at = cluster, now
        return self._cluster

    async def _ask(self) -> Cluster:
        """Finds out the server's features with a slice that is not stored (dryRun=All): the server drops
        fields whose feature gates are off.
        """
        cluster = Cluster(separate_counters=await self._api.minor() >= _SEPARATE_SINCE)
        body = await self._body(f"{self._node}-{DRIVER}-asks", _probe(self._node, cluster), 1)
        kept = await self._api.create_slice(body, dry_run=True)
        return _poorer(cluster, [(body, kept)])

    async def withdraw(self) -> None:
        """Deletes all ResourceSlices of this driver and node."""
        self.close()
        listed, _ = await self._api.slices(DRIVER, self._node)
        for there in listed:
            await self._delete(there["metadata"]["name"])

    def close(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _until_changed(self, version: str) -> None:
        """Waits for a change of the slices in the cluster. If they cannot be watched, the next
        `publish` lists them.
        """
        try:
            await self._api.watch_slices(DRIVER, self._node, version)
        except VgpuError as error:
            if self._complained != str(error):
                self._complained = str(error)
                log.warning(LogEvent.RESOURCE_SLICES_NOT_WATCHED, why=str(error), hint=error.hint)
        else:
            self._changed()

    async def _make(self, wanted: Sequence[Json]) -> list[tuple[Json, Json]]:
        """Creates, updates and deletes slices, so that they equal `wanted`. Returns pairs (sent, stored);
        empty if nothing had to change.
        """
        if self._watch is not None and not self._watch.done() and wanted == self._published:
            return []
        self.close()
        listed, version = await self._api.slices(DRIVER, self._node)
        self._published = ()
        # The watch also reports the writes below, so that the next `publish` sees what the server has kept.
        self._watch = asyncio.ensure_future(self._until_changed(version))
        there = {one["metadata"]["name"]: one for one in listed}
        # numbered names, because the scheduler reads slices in the order of their names
        names = [f"{self._node}-{DRIVER}-{number:03}" for number in range(len(wanted))]
        if there.keys() == set(names) and all(
            _same(there[name]["spec"], spec) for name, spec in zip(names, wanted, strict=True)
        ):
            self._published = wanted
            return []
        generation = max((int(one["spec"]["pool"]["generation"]) for one in there.values()), default=0) + 1
        sent = []
        for name, spec in zip(names, wanted, strict=True):
            body = await self._body(name, spec, generation)
            sent.append((body, await self._put(body, there.get(name))))
        for name in there.keys() - set(names):
            await self._delete(name)
        log.info(LogEvent.RESOURCE_SLICES_PUBLISHED, slices=len(wanted), generation=generation)
        return sent

    async def _body(self, name: str, spec: Json, generation: int) -> Json:
        if self._owner is None:  # the slices get an owner reference, so that they are deleted with the node
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


def _say(cluster: Cluster) -> None:
    if not (cluster.keeps_counters and cluster.keeps_sharing and cluster.keeps_taints):
        log.warning(
            LogEvent.CLUSTER_LACKS_DRA_FEATURES,
            counters=cluster.keeps_counters,
            sharing=cluster.keeps_sharing,
            taints=cluster.keeps_taints,
        )


def _probe(node: str, cluster: Cluster) -> Json:
    """A slice that has one device for each feature that may be off."""
    counters = {"a": {"value": "1"}}
    devices: list[Json] = [
        {"name": "a", "consumesCounters": [{"counterSet": "a", "counters": counters}]},
        {"name": "b", "allowMultipleAllocations": True},
        {"name": "c", "taints": [{"key": f"{DRIVER}/asks", "effect": "NoSchedule"}]},
    ]
    sets = {} if cluster.separate_counters else {"sharedCounters": [{"name": "a", "counters": counters}]}
    pool = {"name": node, "resourceSliceCount": 1}
    return {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices, **sets}


def _same(there: Json, wanted: Json) -> bool:
    """Is the stored slice equal to `wanted`, apart from the generation and fields that the server adds?"""
    pool = {key: value for key, value in there["pool"].items() if key != "generation"}
    kept = {key: value for key, value in there.items() if value not in (None, [])}
    if "devices" in kept:
        kept["devices"] = [_without_times(device) for device in kept["devices"]]
    return {**kept, "pool": pool} == {key: value for key, value in wanted.items() if value != []}


def _without_times(device: Json) -> Json:
    """A device without the time that the server adds to each taint."""
    taints = [{k: v for k, v in taint.items() if k != "timeAdded"} for taint in device.get("taints") or ()]
    return {**device, "taints": taints} if taints else device


def _poorer(cluster: Cluster, sent: Sequence[tuple[Json, Json]]) -> Cluster:
    """The cluster's features, reduced by those that the server dropped."""
    for body, kept in sent:
        if _count(body, "consumesCounters") != _count(kept, "consumesCounters") or (
            len(body["spec"].get("sharedCounters") or ()) != len(kept["spec"].get("sharedCounters") or ())
        ):
            cluster = replace(cluster, keeps_counters=False)
        if _count(body, "allowMultipleAllocations") != _count(kept, "allowMultipleAllocations"):
            cluster = replace(cluster, keeps_sharing=False)
        if _count(body, "taints") != _count(kept, "taints"):
            cluster = replace(cluster, keeps_taints=False)
    return cluster


def _count(body: Json, key: str) -> int:
    devices: list[dict[str, Any]] = body["spec"].get("devices") or []
    return sum(bool(device.get(key)) for device in devices)
