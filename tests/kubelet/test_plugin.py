"""The device plugin as a double of the kubelet sees it over real sockets."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.kubelet.conftest import FAST, MEMORY, Turned, node_in, run
from tests.kubelet.double import AdmissionError
from tests.node.world import FakeGateway, device, request
from vgpud.inject.driver import DriverFiles
from vgpud.model.device import Health, Node
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Mode, Mount, State
from vgpud.serve.kubelet.plugin import Plugin

UNITS = "vgpud.io/memory-gib"
CARDS = """version = 1
[kubelet]
check_seconds = 0.2
[[kubelet.resource]]
name = "vgpud.io/gpu"
kind = "card"
[[kubelet.resource]]
name = "vgpud.io/quarter"
kind = "part"
parts = 4
"""


def four_cards() -> FakeGateway:
    cards = tuple(replace(device(i, 16), numa_node=i // 2) for i in range(4))
    return FakeGateway(node=Node(devices=cards))


def test_a_pods_memory_units_are_allocated_and_released(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            kubelet = node.kubelet
            assert len(await kubelet.healthy(UNITS, 160)) == 160
            answer = await kubelet.admit("default/train", UNITS, 7)
            (held,) = node.allocations
            assert [d.name for d in answer.cdi_devices] == [held.cdi_name]
            assert node.world.specs() == [f"vgpud.io-vgpu_{held.id}.json"]
            assert not answer.envs and not answer.mounts and not answer.devices
            assert sum(part.memory_bytes for part in held.slices) == 7 * GIB
            assert held.slices[0].mode is Mode.PRELOAD
            await node.until(lambda: any(h.pod == "default/train/main" for h in node.door.allocator.holds))
            kubelet.end("default/train")
            await node.until(lambda: not node.allocations)
            assert node.world.is_empty()
            await kubelet.healthy(UNITS, 160)

    run(story())


def test_memory_units_held_by_allocations_outside_the_kubelet_are_unhealthy(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            taken = await node.world.keeper.allocate(request("by-hand", gib=50))
            healthy = await node.kubelet.healthy(UNITS, 110)
            uuid = taken.slices[0].device_uuid
            assert sum(name.startswith(uuid) for name in healthy) == 30
            with pytest.raises(AdmissionError, match="available 30"):
                await node.kubelet.admit("a/b", UNITS, 31, among=lambda name: name.startswith(uuid))
            # ids that pods hold stay healthy, however full their device is
            await node.kubelet.admit("a/b", UNITS, 30, among=lambda name: name.startswith(uuid))
            await node.kubelet.wait(
                lambda: node.kubelet.in_use(UNITS) <= node.kubelet.endpoints[UNITS].healthy
            )
            await node.kubelet.healthy(UNITS, 110)

    run(story())


def test_preferred_units_of_a_container_are_packed_on_one_device(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            for pod, units in (("a/one", 50), ("a/two", 60), ("a/three", 15)):
                await node.kubelet.admit(pod, UNITS, units)
            used = sorted(u.memory_bytes // GIB for u in node.world.parts.book.use.values())
            # the 15 units are on the device with 20 units left, and not on the one with 30
            assert used == [50, 75]
            # the scheduler counts 35 free units in all, but no device has 33
            with pytest.raises(AdmissionError, match=r"33 of .* came from 2 cards .*across"):
                await node.kubelet.admit("a/four", UNITS, 33)
            assert len(node.allocations) == 3

    run(story())


def test_memory_units_of_two_devices_may_be_combined_where_the_policy_allows_it(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, MEMORY + 'across = "even"\n') as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/big", UNITS, 120)
            (held,) = node.allocations
            assert [part.memory_bytes // GIB for part in held.slices] == [60, 60]

    run(story())


def test_several_kubelet_resources_share_the_same_devices(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, CARDS, four_cards()) as node:
            kubelet = node.kubelet
            await kubelet.healthy("vgpud.io/gpu", 4)
            await kubelet.healthy("vgpud.io/quarter", 16)
            await kubelet.admit("a/two", "vgpud.io/gpu", 2)
            (held,) = node.allocations
            nodes = {
                kubelet.endpoints["vgpud.io/gpu"].devices[p.device_uuid].topology.nodes[0].ID
                for p in held.slices
            }
            assert len(nodes) == 1, "two cards of different NUMA nodes, where two of one were free"
            await kubelet.healthy("vgpud.io/quarter", 8)
            await kubelet.admit("a/half", "vgpud.io/quarter", 2)
            await kubelet.healthy("vgpud.io/gpu", 3)
            part = next(a for a in node.allocations if a.slices[0].mode is Mode.PRELOAD)
            assert part.slices[0].memory_bytes == 8 * GIB

    run(story())


@pytest.mark.parametrize("changed", [{"health": Health.FAILED}, {"ailment": "NVML asks for a reset"}])
def test_memory_units_are_unhealthy_while_their_device_is(short: Path, changed: dict[str, Any]) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            well = node.world.gateway.node
            await node.kubelet.admit("a/b", UNITS, 1)
            sick = replace(well.devices[0], **changed)
            node.world.gateway.node = replace(well, devices=(sick, well.devices[1]))
            await node.kubelet.healthy(UNITS, 80)
            node.world.gateway.node = well
            await node.kubelet.healthy(UNITS, 160)

    run(story())


def test_memory_units_of_a_drained_device_are_unhealthy(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 3)
            uuid = node.allocations[0].slices[0].device_uuid
            await node.world.keeper.operations.drain(uuid, True)
            await node.kubelet.healthy(UNITS, 83)

    run(story())


def test_a_policy_reload_changes_the_resources_of_a_running_kubelet(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, CARDS) as node:
            await node.kubelet.healthy("vgpud.io/gpu", 2)
            await node.policy(MEMORY)
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.wait(lambda: node.kubelet.endpoints["vgpud.io/gpu"].ended)
            await node.policy(MEMORY + 'unit = "2GiB"\n')
            await node.kubelet.healthy(UNITS, 80)

    run(story())


def test_a_resource_that_a_policy_reload_changes_is_served_by_one_plugin(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Plugin] = []
    start, stop = Plugin.start, Plugin.stop

    async def noted(plugin: Plugin) -> None:
        started.append(plugin)
        await start(plugin)

    async def slow(plugin: Plugin) -> None:
        await stop(plugin)
        await asyncio.sleep(5 * FAST.look)

    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.policy(MEMORY + 'unit = "2GiB"\n')
            await node.kubelet.healthy(UNITS, 80)
            assert [plugin.serving for plugin in started] == [False, True]

    monkeypatch.setattr(Plugin, "start", noted)
    monkeypatch.setattr(Plugin, "stop", slow)
    run(story())


def test_a_kubelet_without_cdi_gets_environment_and_mounts(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, MEMORY.replace("[kubelet]", '[kubelet]\ninject = "edits"')) as node:
            await node.kubelet.healthy(UNITS, 160)
            library = Mount("/lib/libcuda.so.1", "/usr/lib/x/libcuda.so.1")
            node.world.parts.specs.driver = DriverFiles(mounts=(library,))
            answer = await node.kubelet.admit("a/b", UNITS, 2)
            assert not answer.cdi_devices
            assert [(m.host_path, m.read_only) for m in answer.mounts] == [("/lib/libcuda.so.1", True)]
            assert answer.envs["LD_LIBRARY_PATH"] == "/usr/lib/x"
            assert answer.envs["CUDA_VISIBLE_DEVICES"] == node.allocations[0].slices[0].device_uuid

    run(story())


def test_a_resource_can_have_a_thousand_ids_of_63_characters(short: Path) -> None:
    async def story() -> None:
        cards = tuple(device(i, 126) for i in range(8))
        long = replace(cards[0], uuid="GPU-" + "a" * 70)
        gateway = FakeGateway(node=Node(devices=(long, *cards[1:])))
        async with node_in(short, gateway=gateway) as node:
            await node.kubelet.healthy(UNITS, 1008)
            names = node.kubelet.endpoints[UNITS].devices
            assert max(map(len, names)) <= 63
            answers = [await node.kubelet.admit(f"a/p{i}", UNITS, 126) for i in range(8)]
            assert len({a.cdi_devices[0].name for a in answers}) == 8
            with pytest.raises(AdmissionError, match="is not an id of"):
                await node.kubelet.allocate(UNITS, ["x" * 63])

    run(story())


def test_memory_units_are_overcommitted_by_policy(short: Path) -> None:
    async def story() -> None:
        beyond = MEMORY + '[[device]]\nmode = "preload"\npreload.memory_overcommit = 1.5\n'
        async with node_in(short, beyond) as node:
            await node.kubelet.healthy(UNITS, 240)
            for pod in ("a/one", "a/two"):
                await node.kubelet.admit(pod, UNITS, 60, among=lambda name: name.startswith("GPU-00000000"))
            assert len(await node.kubelet.healthy(UNITS, 240)) == 240

    run(story())


def test_memory_units_with_compute_are_bounded_by_the_free_compute_shares_of_the_devices(short: Path) -> None:
    """The free compute shares of the devices bound the healthy units, although the memory is
    overcommitted.
    """

    async def story() -> None:
        beyond = (
            MEMORY + 'limit_compute = true\n[[device]]\nmode = "preload"\npreload.memory_overcommit = 1.5\n'
        )
        async with node_in(short, beyond) as node:
            await node.kubelet.healthy(UNITS, 160)
            taken = await node.world.keeper.allocate(request("by-hand", gib=10, share=Percent(5000)))
            uuid = taken.slices[0].device_uuid
            healthy = await node.kubelet.healthy(UNITS, 120)
            assert sum(name.startswith(uuid) for name in healthy) == 40
            await node.kubelet.admit("a/b", UNITS, 40, among=lambda name: name.startswith(uuid))
            held = [a for a in node.allocations if a.id != taken.id]
            assert [part.share for a in held for part in a.slices] == [Percent(5000)]
            # the healthy ids are those of the pod and those of the other device
            await node.kubelet.healthy(UNITS, 120)

    run(story())


def test_a_resource_without_a_device_is_reported_with_the_reason(short: Path) -> None:
    async def story() -> None:
        by_share = MEMORY + 'isolation = "compute"\n[[device]]\nmode = "exclusive"\n'
        with capture_logs() as logs:
            async with node_in(short, by_share) as node:
                await node.kubelet.healthy(UNITS, 0)
                await node.until(lambda: any("there will be none" in str(entry) for entry in logs))
        (said,) = {entry["why"] for entry in logs if "there will be none" in str(entry)}
        assert "the policy fixes mode exclusive" in said

    run(story())


def test_vgpud_runs_without_a_kubelet(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.stop()
            (short / "kubelet").rename(short / "gone")
            await asyncio.sleep(0.2)
            assert node.task is not None and not node.task.done()

    run(story())


def test_device_ids_of_a_failed_allocation_stay_unhealthy(short: Path) -> None:
    """The container of a failed allocation has no working device, even after the device recovers."""

    async def story() -> None:
        async with node_in(short, MEMORY.replace("release_seconds = 1", "release_seconds = 3600")) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 3)
            well = node.world.gateway.node
            node.world.gateway.node = replace(
                well, devices=(replace(well.devices[0], health=Health.LOST), *well.devices[1:])
            )
            await node.until(lambda: node.allocations[0].state is State.FAILED)
            node.world.gateway.node = well
            await node.kubelet.healthy(UNITS, 157)
            assert not node.kubelet.in_use(UNITS) & node.kubelet.endpoints[UNITS].healthy

    run(story())


def test_allocations_of_ended_pods_are_released_after_the_last_resource_is_removed(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 3)
            await node.kubelet.admit("a/stays", UNITS, 2)
            await node.until(lambda: all(hold.pod for hold in node.door.allocator.holds))
            await node.policy(MEMORY.partition("[[kubelet.resource]]")[0])
            await node.kubelet.wait(lambda: node.kubelet.endpoints[UNITS].ended)
            node.kubelet.end("a/b")
            await node.until(lambda: len(node.allocations) == 1)
            assert node.allocations[0].slices[0].memory_bytes == 2 * GIB

    run(story())


def test_a_pod_that_fits_no_card_fails_once_and_then_waits(short: Path, turned: Turned) -> None:
    """A controller recreates its failed pod at once. Without the wait one pod after the other would fail."""

    async def story() -> None:
        async with node_in(short, MEMORY.replace("release_seconds = 1", "release_seconds = 3600")) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 50)
            uuid = node.allocations[0].slices[0].device_uuid
            await node.kubelet.admit("a/two", UNITS, 40, among=lambda name: not name.startswith(uuid))
            for span in (30.0, 60.0):
                with pytest.raises(AdmissionError, match="came from 2 cards"):
                    await node.kubelet.admit("a/big", UNITS, 60)
                # The healthy ids are those that pods hold, and those left on the emptier device. So the
                # scheduler keeps the next pod waiting.
                await node.kubelet.healthy(UNITS, 130)
                with pytest.raises(AdmissionError, match="requested 60, available 40"):
                    await node.kubelet.admit("a/big", UNITS, 60)
                turned.passed += span - 5.0
                await asyncio.sleep(0.5)
                await node.kubelet.healthy(UNITS, 130)
                turned.passed += 10.0
                await node.kubelet.healthy(UNITS, 160)
            with pytest.raises(AdmissionError, match="came from 2 cards"):
                await node.kubelet.admit("a/big", UNITS, 60)
            await node.kubelet.healthy(UNITS, 130)
            await node.kubelet.admit("a/small", UNITS, 40)

    run(story())
