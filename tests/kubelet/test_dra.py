"""DRA claims as the kubelet makes them: registration, prepare and unprepare over real sockets, in both
versions of the API.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.clock import until
from tests.kubelet.cluster import DRIVER, Cluster, HttpCluster, refusal
from tests.kubelet.conftest import Turned, run
from tests.kubelet.double import PATIENCE_SECONDS, encode
from tests.node.world import ROOT, World, policy_of, world
from vgpud.api.gen.kubelet import dra_health_pb2, dra_v1_pb2, dra_v1beta1_pb2
from vgpud.api.gen.kubelet import pluginregistration_v1_pb2 as registration
from vgpud.inject.driver import DriverFiles
from vgpud.ledger import RowTable
from vgpud.ledger.rows import LedgerRows
from vgpud.model.device import Health
from vgpud.model.device import Node as NvidiaNode
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import ANYONE, DeviceNode, Mode, Mount
from vgpud.node.room import Room
from vgpud.serve.dra import plugin
from vgpud.serve.dra.door import DraDoor, Pace
from vgpud.serve.dra.monitors import Monitors

POLICY = """version = 1
[[device]]
match = { index = 0 }
mode = "preload"
[[device]]
mode = "mps"
[dra]
enabled = true
check_seconds = 0.2
"""
CONTROL = DeviceNode("/dev/nvidiactl", 195, 255)
FAST = Pace(look=0.02, settle=0.005, retry=0.05)
VERSIONS = [dra_v1_pb2, dra_v1beta1_pb2]


@dataclass
class Dra:
    world: World
    cluster: Cluster
    folder: Path
    door: DraDoor | None = None
    task: asyncio.Task[None] | None = None

    def open(self) -> None:
        room = Room(self.world.keeper, self.world.parts.inventory, self.world.parts.book)
        kubelet = self.folder / "k"
        nodes = {one.uuid: DeviceNode(f"/dev/nvidia{one.index}", 195, one.index) for one in room.devices}
        monitors = Monitors(
            self.world.parts.specs, lambda: room.devices, lambda device: (CONTROL, nodes[device.uuid])
        )
        self.door = DraDoor(
            self.world.keeper, room, kubelet, self.rows, self.cluster, "node-1", monitors, FAST
        )
        self.task = asyncio.ensure_future(self.door.run())

    @property
    def rows(self) -> LedgerRows:
        return self.world.ledger.rows[RowTable.PREPARED_CLAIMS]

    async def close(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    @property
    def registrar(self) -> Path:
        return self.folder / "k" / "plugins_registry" / f"{DRIVER}-reg.sock"

    @property
    def held(self) -> dict[str, Any]:
        return {a.request.id: a for a in tuple(self.world.keeper.book)}

    until = staticmethod(until)

    async def published(self, count: int = 2) -> None:
        """Waits until `count` devices accept new claims."""
        await self.until(lambda: sum("taints" not in d for d in self.cluster.pool()[0]) == count)

    # --- calls as the kubelet makes them

    async def register(self) -> registration.PluginInfo:
        """Registers the driver as the kubelet's plugin watcher does with a new socket."""
        await self.until(self.registrar.exists)
        info = await call(
            self.registrar,
            "pluginregistration.Registration/GetInfo",
            registration.InfoRequest(),
            registration.PluginInfo,
        )
        await call(
            self.registrar,
            "pluginregistration.Registration/NotifyRegistrationStatus",
            registration.RegistrationStatus(plugin_registered=True),
            registration.RegistrationStatusResponse,
        )
        assert isinstance(info, registration.PluginInfo)
        return info

    async def node(self, verb: str, claims: list[dict[str, Any]], version: ModuleType = dra_v1_pb2) -> Any:
        info = await self.register()
        package = version.DESCRIPTOR.package
        asked = getattr(version, f"Node{verb}ResourcesRequest")()
        for claim in claims:
            about = claim["metadata"]
            asked.claims.add(namespace=about["namespace"], name=about["name"], uid=about["uid"])
        reply = getattr(version, f"Node{verb}ResourcesResponse")
        found = await call(Path(info.endpoint), f"{package}.DRAPlugin/Node{verb}Resources", asked, reply)
        assert set(found.claims) == {claim["metadata"]["uid"] for claim in claims}
        return found.claims

    async def prepare(self, claim: dict[str, Any], version: ModuleType = dra_v1_pb2) -> Any:
        return (await self.node("Prepare", [claim], version))[claim["metadata"]["uid"]]

    async def unprepare(self, claim: dict[str, Any], version: ModuleType = dra_v1_pb2) -> str:
        error = (await self.node("Unprepare", [claim], version))[claim["metadata"]["uid"]].error
        return str(error)


async def call(socket: Path, method: str, request: Any, reply: Any) -> Any:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        made = channel.unary_unary(
            f"/{method}", request_serializer=encode, response_deserializer=reply.FromString
        )
        return await made(request, timeout=PATIENCE_SECONDS)


@asynccontextmanager
async def dra_in(folder: Path, policy: str = POLICY, cluster: Cluster | None = None) -> AsyncIterator[Dra]:
    (folder / "k" / "plugins_registry").mkdir(parents=True)
    async with world(folder) as made:
        policy_of(folder, policy)
        await made.keeper.policies.reload(dry_run=False)
        dra = Dra(made, cluster or Cluster(), folder)
        dra.open()
        try:
            yield dra
        finally:
            await dra.close()


@pytest.mark.parametrize("version", VERSIONS, ids=["v1", "v1beta1"])
def test_a_claim_of_a_fraction_is_published_prepared_and_released(short: Path, version: ModuleType) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            info = await dra.register()
            assert (info.type, info.name) == ("DRAPlugin", DRIVER)
            assert list(info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "7Gi"})
            assert claim is not None
            uid = claim["metadata"]["uid"]
            answer = await dra.prepare(claim, version)
            assert not answer.error
            allocation = dra.held[f"claim/{uid}"]
            assert allocation.slices[0].memory_bytes == 7 * GIB
            assert allocation.slices[0].mode is Mode.PRELOAD
            assert allocation.request.owner.uid == ANYONE
            (device,) = answer.devices
            assert (list(device.request_names), device.pool_name) == (["gpu"], "node-1")
            assert list(device.cdi_device_ids) == [allocation.cdi_name]
            if version is dra_v1_pb2:
                assert device.share_id == f"share-{uid}"
            assert dra.world.specs() == [f"vgpud.io-vgpu_{allocation.id}.json"]
            # a repeated call has the same result in either version, even without the API server
            dra.cluster.fail = 500
            for again in VERSIONS:
                same = await dra.prepare(claim, again)
                assert list(same.devices[0].cdi_device_ids) == list(device.cdi_device_ids)
            assert await dra.unprepare(claim, version) == ""
            assert await dra.unprepare(claim, version) == ""
            assert dra.world.is_empty()
            dra.cluster.fail = 0

    run(story())


def test_claim_parameters_lower_memory_and_cores_of_mps(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "compute", {"memory": "8Gi", "cores": "40"})
            less = dra.cluster.allocate(
                "b", "compute", {"memory": "8Gi", "cores": "40"}, config=[parameters(memory="2GiB", cores=10)]
            )
            none = dra.cluster.allocate("c", "compute", {"memory": "8Gi", "cores": "40"})
            assert claim is not None
            assert less is not None
            assert none is None, "more cores than the card has"
            assert not (await dra.prepare(claim)).error
            assert not (await dra.prepare(less)).error
            sizes = [(s.memory_bytes // GIB, str(s.share)) for a in dra.held.values() for s in a.slices]
            assert sizes == [(8, "40%"), (2, "10%")]

    run(story())


def parameters(source: str = "FromClaim", **body: Any) -> dict[str, Any]:
    whole = {"apiVersion": "vgpud.io/v1", "kind": "VgpuConfig", **body}
    return {"source": source, "requests": [], "opaque": {"driver": DRIVER, "parameters": whole}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (parameters(memory="70GiB"), "allocated were 7GiB (E103)"),
        (parameters(memory="7G"), "'G' can mean 1000s or 1024s (E101)"),
        (parameters(memory=7), "memory is 7, not text with a unit (E103)"),
        (parameters(cores="30"), "cores is '30', not a number (E103)"),
        (parameters(cores=0), "bad share 0: it must be from 0.01 to 100 (E102)"),
        (parameters(gpus=1), "'gpus' is not a parameter of a VgpuConfig (E103)"),
        (parameters(kind="GpuConfig"), "parameters of vgpud.io/v1 GpuConfig are not known (E103)"),
        ({"opaque": {"driver": DRIVER, "parameters": "x"}}, "the parameters are not an object (E103)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_claim_parameters_beyond_the_device_are_refused(
    short: Path, config: dict[str, Any], words: str
) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            # the claim's own parameters override those of its class
            base = [parameters("FromClass", memory="1GiB")]
            claim = dra.cluster.allocate("a", "quota", {"memory": "7Gi"}, config=[*base, config])
            assert claim is not None
            assert words in (await dra.prepare(claim)).error
            assert dra.world.is_empty()
            assert await dra.unprepare(claim) == ""

    run(story())


def test_an_invalid_claim_fails_without_the_others(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            good, other, gone, renewed = (
                dra.cluster.allocate(name, "quota", {"memory": "1Gi"}) for name in ("a", "b", "c", "d")
            )
            assert good and other and gone and renewed
            result = other["status"]["allocation"]["devices"]["results"][0]
            result["device"] = "gpu-that-was-sold"
            del dra.cluster.claims["ns", "c"]
            asked = {"metadata": {**renewed["metadata"], "uid": "an-older-one"}}
            answers = await dra.node("Prepare", [good, other, gone, asked, good])
            errors = {uid: answer.error for uid, answer in answers.items()}
            assert errors[good["metadata"]["uid"]] == ""
            assert "is no longer published by this node (E302)" in errors[other["metadata"]["uid"]]
            assert "404" in errors[gone["metadata"]["uid"]]
            assert "has uid" in errors["an-older-one"]
            assert len(dra.held) == 1

    run(story())


def test_claims_of_other_drivers_are_ignored(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            (result,) = claim["status"]["allocation"]["devices"]["results"]
            result["driver"] = "nic.example.com"
            answer = await dra.prepare(claim)
            assert (answer.error, len(answer.devices)) == ("", 0)
            assert dra.world.is_empty()

    run(story())


def told(dra: Dra, name: str) -> list[tuple[str, ...]]:
    """The conditions of the claim's devices: status, reason, message."""
    devices = dra.cluster.claims["ns", name]["status"].get("devices", ())
    keys = ("status", "reason", "message")
    return [tuple(condition[key] for key in keys) for one in devices for condition in one["conditions"]]


def test_the_status_of_a_claim_shows_the_state_of_its_devices(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short, POLICY.replace("check_seconds = 0.2", "check_seconds = 3600")) as dra:
            await dra.published()
            claim, watch = dra.cluster.allocate("a", "quota", {"memory": "1Gi"}), dra.cluster.watch("watch")
            assert claim is not None and dra.door is not None
            others = {"driver": "nic.example.com", "pool": "p", "device": "d"}
            claim["status"]["allocation"]["devices"]["results"].append({"request": "nic", **others})
            claim["status"]["devices"] = [{**others, "conditions": []}]
            for one in (claim, watch):
                assert not (await dra.prepare(one)).error
            (held,) = dra.held.values()
            ready = ("True", "Prepared", f"allocation {held.id}")
            await dra.until(lambda: told(dra, "a") == [ready])
            await dra.until(lambda: told(dra, "watch") == [("True", "Watched", "NVML reads the device")] * 2)
            nic, gpu = claim["status"]["devices"]
            assert nic == {**others, "conditions": []}
            assert gpu["data"] == {"allocation": held.id}
            # a check writes only what has changed
            before = len(dra.cluster.requests)
            await dra.door.preparer.check()
            assert [call for call in dra.cluster.requests[before:] if call.startswith("status")] == []
            well = dra.world.gateway.node
            lost = replace(well.devices[0], health=Health.LOST)
            dra.world.gateway.node = replace(well, devices=(lost, well.devices[1]))
            while not any(a.failure for a in dra.held.values()):
                await dra.world.keeper.listings.devices()  # looks at the devices
                await asyncio.sleep(0.02)
            await dra.door.preparer.check()
            ((status, reason, message),) = told(dra, "a")
            assert (status, reason) == ("False", "Failed")
            assert message.startswith(f"allocation {held.id}: ")

    run(story())


def test_the_status_of_a_claim_is_written_only_once_if_the_cluster_drops_it(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            dra.cluster.off = {"DRAResourceClaimDeviceStatus"}
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None and dra.door is not None
            assert not (await dra.prepare(claim)).error
            await dra.until(lambda: "status ns/a" in dra.cluster.requests)
            for _ in range(3):
                await dra.door.preparer.check()
            assert dra.cluster.requests.count("status ns/a") == 1
            dra.cluster.off = set()
            await dra.register()  # the kubelet that starts may belong to a cluster with other feature gates
            await dra.until(lambda: told(dra, "a"))

    run(story())


def monitor_spec(dra: Dra, claim: dict[str, Any]) -> dict[str, Any]:
    path = dra.world.parts.specs.folder / f"vgpud.io-monitor_{claim['metadata']['uid']}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def test_a_claim_with_admin_access_can_monitor_cards_and_allocates_nothing(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            full = dra.cluster.allocate("full", "quota", {"memory": "79Gi"})
            assert full is not None and not (await dra.prepare(full)).error
            watch = dra.cluster.watch("watch")
            uid = watch["metadata"]["uid"]
            answer = await dra.prepare(watch)
            assert not answer.error
            cdi = [list(device.cdi_device_ids) for device in answer.devices]
            assert cdi == [[f"vgpud.io/monitor={uid}-all"], []]
            assert set(dra.held) == {f"claim/{full['metadata']['uid']}"}
            (device,) = monitor_spec(dra, watch)["devices"]
            paths = [node["path"] for node in device["containerEdits"]["deviceNodes"]]
            assert paths == ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1"], "CUDA needs nvidia-uvm"
            # the driver's files have changed, and the claim is prepared again after a reboot
            mount = Mount("/new/libnvidia-ml.so.1", "/new/libnvidia-ml.so.1")
            dra.world.parts.specs.driver = DriverFiles((mount,))
            await dra.until(lambda: "containerEdits" in monitor_spec(dra, watch))
            await dra.world.parts.specs.remove_monitors(uid)
            assert not (await dra.prepare(watch)).error
            assert monitor_spec(dra, watch)
            assert await dra.unprepare(watch) == ""
            assert not monitor_spec(dra, watch)

    run(story())


def test_a_claim_may_have_a_slice_beside_its_admin_access(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.watch("both")
            share = dra.cluster.allocate("share", "quota", {"memory": "1Gi"})
            assert share is not None
            results = claim["status"]["allocation"]["devices"]["results"]
            results += share["status"]["allocation"]["devices"]["results"]
            dra.world.effectors[Mode.PRELOAD].fail = {"attach"}
            assert "attach was told to fail (E601)" in (await dra.prepare(claim)).error
            assert not monitor_spec(dra, claim)
            dra.world.effectors[Mode.PRELOAD].fail = set()
            answer = await dra.prepare(claim)
            uid, (held,) = claim["metadata"]["uid"], dra.held.values()
            assert {
                n: list(d.cdi_device_ids) for d in answer.devices for n in d.request_names if n == "gpu"
            } == {"gpu": [held.cdi_name]}
            assert held.request.id == f"claim/{uid}"
            assert await dra.unprepare(claim) == ""
            assert dra.world.is_empty()
            assert not monitor_spec(dra, claim)

    run(story())


def test_two_devices_of_one_request_are_one_allocation(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short, 'version = 1\n[dra]\nenabled = true\nauto = "device"\n') as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "card", count=2)
            assert claim is not None
            answer = await dra.prepare(claim)
            assert [len(device.cdi_device_ids) for device in answer.devices] == [1, 0]
            (allocation,) = dra.held.values()
            assert [part.mode for part in allocation.slices] == [Mode.EXCLUSIVE] * 2
            # devices that claims hold stay published, because the scheduler counts them
            await dra.published(2)

    run(story())


def test_two_requests_of_one_claim_are_two_allocations(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"}, request="small/first")
            more = dra.cluster.allocate("b", "quota", {"memory": "2Gi"}, request="large")
            assert claim is not None
            assert more is not None
            results = claim["status"]["allocation"]["devices"]["results"]
            results += more["status"]["allocation"]["devices"]["results"]
            answer = await dra.prepare(claim)
            assert sorted(name for d in answer.devices for name in d.request_names) == ["large", "small"]
            uid = claim["metadata"]["uid"]
            assert set(dra.held) == {f"claim/{uid}/small/first", f"claim/{uid}/large"}
            assert await dra.unprepare(claim) == ""
            assert dra.world.is_empty()

    run(story())


def test_a_prepare_that_fails_is_undone_and_may_be_tried_again(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            dra.world.effectors[Mode.PRELOAD].fail = {"attach"}
            assert "attach was told to fail (E601)" in (await dra.prepare(claim)).error
            assert dra.world.is_empty()
            dra.world.effectors[Mode.PRELOAD].fail = set()
            assert not (await dra.prepare(claim)).error
            # the device was lost and has come back, and the claim is prepared again
            well = dra.world.gateway.node
            lost = replace(well.devices[0], health=Health.LOST)
            dra.world.gateway.node = replace(well, devices=(lost, well.devices[1]))
            await dra.until(lambda: any(a.failure for a in dra.held.values()))
            await dra.published(1)
            dra.world.gateway.node = well
            await dra.published(2)
            assert not (await dra.prepare(claim)).error
            assert not any(a.failure for a in dra.held.values())

    run(story())


def test_the_unprepare_of_a_claim_releases_what_a_prepare_that_was_cancelled_still_makes(
    short: Path, turned: Turned
) -> None:
    """The kubelet's call has a time limit, and the driver may hang for longer."""

    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            gateway, answers = dra.world.gateway, threading.Event()
            look = gateway.snapshot

            def hang() -> NvidiaNode:
                assert answers.wait(PATIENCE_SECONDS)
                return look()

            gateway.snapshot = hang  # type: ignore[method-assign]
            turned.passed += 60  # the last snapshot is too old to choose a device
            given_up = asyncio.ensure_future(dra.prepare(claim))
            await dra.until(lambda: tuple(dra.rows))
            given_up.cancel()
            await asyncio.wait((given_up,))
            unprepared = asyncio.ensure_future(dra.unprepare(claim))
            await asyncio.wait((unprepared,), timeout=0.5)
            answers.set()
            assert await unprepared == ""
            await dra.until(lambda: not dra.world.keeper.allocates.tasks)
            assert dra.world.is_empty()
            assert not tuple(dra.rows)

    run(story())


def test_an_unprepare_after_a_restart_of_vgpud_releases_the_claim(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            first = await dra.prepare(claim)
            for content in (None, "{"):  # the ledger row of the claim may be damaged
                await dra.close()
                if content is not None:
                    await dra.rows.put((claim["metadata"]["uid"], content))
                dra.open()
                again = await dra.prepare(claim)
                assert encode(again) == encode(first)
                assert len(dra.held) == 1
            await dra.close()
            await dra.rows.drop(claim["metadata"]["uid"])
            dra.open()
            assert await dra.unprepare(claim) == ""
            assert dra.world.is_empty()

    run(story())


def test_a_cancelled_prepare_makes_no_second_allocation(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            gate = dra.world.effectors[Mode.PRELOAD].gate = asyncio.Event()
            cut = asyncio.ensure_future(dra.prepare(claim))
            await dra.until(lambda: len(dra.held) == 1)
            cut.cancel()
            second = asyncio.ensure_future(dra.prepare(claim))
            gate.set()
            assert not (await second).error
            assert len(dra.held) == 1
            with suppress(asyncio.CancelledError):
                await cut
            assert await dra.unprepare(claim) == ""
            assert dra.world.is_empty()

    run(story())


def test_an_unprepare_with_running_processes_is_refused(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            await dra.prepare(claim)
            dra.world.effectors[Mode.PRELOAD].pids = (1,)
            assert "still has 1 process" in await dra.unprepare(claim)
            assert len(dra.held) == 1
            dra.world.effectors[Mode.PRELOAD].pids = ()
            assert await dra.unprepare(claim) == ""
            assert dra.world.is_empty()

    run(story())


def test_a_claim_deleted_by_force_leaves_no_allocation(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            await dra.prepare(claim)
            assert dra.door is not None
            dra.cluster.fail = 503
            await dra.door.preparer.check()
            await dra.door.preparer.check()
            assert len(dra.held) == 1, "an API server that is away says nothing of claims"
            dra.cluster.fail = 0
            del dra.cluster.claims["ns", "a"]
            await dra.until(lambda: not dra.held)
            assert dra.world.is_empty()

    run(story())


def test_a_claim_deleted_by_force_is_released_when_its_last_process_has_ended(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            assert not (await dra.prepare(claim)).error
            dra.world.effectors[Mode.PRELOAD].pids = (1,)
            del dra.cluster.claims["ns", "a"]
            with capture_logs() as lines:
                await dra.until(lambda: whys(lines, "deleted_claim_not_released"))
            assert dra.held
            dra.world.effectors[Mode.PRELOAD].pids = ()
            await dra.until(lambda: not dra.held)
            assert dra.world.is_empty()

    run(story())


def test_removed_dra_sockets_are_created_again(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            first = await dra.register()
            dra.registrar.unlink()
            await dra.register()
            Path(first.endpoint).unlink()
            await dra.until(lambda: Path(first.endpoint).exists() and dra.registrar.exists())
            await dra.register()

    run(story())


def test_a_dra_plugin_that_cannot_start_or_is_rejected_is_logged_and_starts_when_it_can(short: Path) -> None:
    async def story() -> None:
        plugins = short / "k" / "plugins"
        plugins.parent.mkdir(parents=True)
        plugins.touch()
        with capture_logs() as lines:
            async with dra_in(short) as dra:
                await dra.until(lambda: whys(lines, "dra_plugin_not_started"))
                plugins.unlink()
                await dra.register()
                await call(
                    dra.registrar,
                    "pluginregistration.Registration/NotifyRegistrationStatus",
                    registration.RegistrationStatus(error="no such version"),
                    registration.RegistrationStatusResponse,
                )
        (why,) = whys(lines, "dra_plugin_not_started")
        assert f"cannot make {plugins}/{DRIVER}: Not a directory" in why
        assert whys(lines, "kubelet_rejected_dra_driver") == ["no such version"]

    run(story())


def whys(lines: Iterable[Any], event: str) -> list[str]:
    return [line["why"] for line in lines if line["event"] == event]


def test_a_claim_status_that_the_cluster_refuses_is_written_by_a_later_check(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            claim = dra.cluster.allocate("a", "quota", {"memory": "1Gi"})
            assert claim is not None
            write, refused = dra.cluster.replace_claim_status, [refusal(409, "conflict")]

            async def conflicts(body: dict[str, Any]) -> dict[str, Any]:
                if refused:
                    raise refused.pop()
                return await write(body)

            dra.cluster.replace_claim_status = conflicts  # type: ignore[method-assign]
            with capture_logs() as lines:
                assert not (await dra.prepare(claim)).error
                await dra.until(lambda: told(dra, "a"))
            assert len(whys(lines, "claim_status_not_written")) == 1

    run(story())


def test_dra_is_turned_on_and_off_by_a_reload_of_the_policy(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short, "version = 1\n") as dra:
            await asyncio.sleep(0.1)
            assert not dra.registrar.exists()
            assert not dra.cluster.requests
            policy_of(short, POLICY)
            await dra.world.keeper.policies.reload(dry_run=False)
            await dra.register()
            await dra.published()
            policy_of(short, "version = 1\n")
            await dra.world.keeper.policies.reload(dry_run=False)
            await dra.until(lambda: not dra.cluster.slices_by_name and not dra.registrar.exists())

    run(story())


def test_removed_resource_slices_are_published_again(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short) as dra:
            await dra.published()
            dra.cluster.wipe()
            await dra.published()
            dra.cluster.fail = 500
            dra.cluster.wipe()
            await dra.until(lambda: dra.cluster.requests[-3:] == ["list"] * 3)
            dra.cluster.fail = 0
            await dra.published()
            taken = await dra.world.keeper.allocate(request_by_hand())
            await dra.until(lambda: "73Gi" in str(dra.cluster.pool()))
            await dra.world.keeper.release(taken.id, ROOT, force=False)
            await dra.until(lambda: "73Gi" not in str(dra.cluster.pool()))

    run(story())


def request_by_hand() -> Any:
    from tests.node.world import request
    from vgpud.model.tenancy import Selector

    return request("by-hand", gib=7, selector=Selector(indices=(0,)))


def test_the_clusters_http_double_answers_like_the_in_process_double() -> None:
    cluster = Cluster()
    served = HttpCluster(cluster)
    assert '"server": "http://127.0.0.1:' in served.kubeconfig
    served.close()
    assert refusal(404, "x").status == 404


def test_resource_slices_are_back_after_a_restart_of_the_kubelet_before_the_next_check(short: Path) -> None:
    """The kubelet deletes the node's slices at its start, either before or after the driver has registered
    again.
    """

    async def story() -> None:
        async with dra_in(short, POLICY.replace("check_seconds = 0.2", "check_seconds = 3600")) as dra:
            await dra.published()
            for _ in range(2):
                dra.cluster.wipe()
                await dra.register()
                await dra.published()
                dra.cluster.wipe()
                await dra.published()

    run(story())


def test_resource_slices_that_another_program_deletes_are_back_before_the_next_check(short: Path) -> None:
    async def story() -> None:
        async with dra_in(short, POLICY.replace("check_seconds = 0.2", "check_seconds = 3600")) as dra:
            for _ in range(3):  # no kubelet registers here, so only the watch can report the deletion
                await dra.published()
                dra.cluster.wipe()
            await dra.published()

    run(story())


def test_resource_slices_are_published_again_without_the_right_to_watch_them(short: Path) -> None:
    async def story() -> None:
        cluster = Cluster()
        cluster.refuses_watches = True
        async with dra_in(short, cluster=cluster) as dra:
            await dra.published()
            dra.cluster.wipe()
            await dra.published()

    run(story())


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
def test_the_kubelet_gets_the_health_of_each_device(
    short: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Kubernetes 1.36 on the kubelet asks for health, and logs an error every 5 s if the driver does not
    answer.
    """
    monkeypatch.setattr(plugin, "_HEALTH_SECONDS", 0.05)

    async def story() -> None:
        async with dra_in(short) as dra:
            info = await dra.register()
            await dra.published()
            async with grpc.aio.insecure_channel(f"unix:{info.endpoint}") as channel:
                stream: Any = channel.unary_stream(
                    f"/{version}.DRAResourceHealth/NodeWatchResources",
                    request_serializer=encode,
                    response_deserializer=dra_health_pb2.NodeWatchResourcesResponse.FromString,
                )(dra_health_pb2.NodeWatchResourcesRequest())
                first = await stream.read()
                published = [device["name"] for device in dra.cluster.pool()[0]]
                assert [one.device.device_name for one in first.devices] == published
                assert {one.device.pool_name for one in first.devices} == {"node-1"}
                assert {one.health for one in first.devices} == {dra_health_pb2.HEALTHY}
                well = dra.world.gateway.node
                lost = replace(well.devices[0], health=Health.LOST, health_reason="it fell off the bus")
                dra.world.gateway.node = replace(well, devices=(lost, well.devices[1]))
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while (told := (await stream.read()).devices[0]).health != dra_health_pb2.UNHEALTHY:
                        pass
                assert told.message

    run(story())
