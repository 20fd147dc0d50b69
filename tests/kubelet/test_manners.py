"""Irregular behaviour of kubelets, and restarts of vgpud at any moment. Nothing leaks, and no pod loses its
allocation.
"""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.kubelet.conftest import FAST, MEMORY, Node, Turned, node_in, run
from tests.kubelet.double import AdmissionError, fixed_plugins
from vgpud.api.gen.kubelet import deviceplugin_v1beta1_pb2 as dp
from vgpud.ledger import RowTable
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode

UNITS = "vgpud.io/memory-gib"
SLOW = MEMORY.replace("release_seconds = 1", "release_seconds = 3600")


def gib(node: Node) -> list[int]:
    return sorted(a.slices[0].memory_bytes // GIB for a in node.allocations)


def test_vgpud_registers_all_resources_again_with_a_restarted_kubelet(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 5)
            for again in (node.kubelet.restart, node.kubelet.remove_folder, node.kubelet.restart):
                await again()
                healthy = await node.kubelet.healthy(UNITS, 160)
                assert node.kubelet.in_use(UNITS) <= healthy
            await node.kubelet.admit("a/two", UNITS, 6)
            assert gib(node) == [5, 6]

    run(story())


def test_no_allocation_is_released_while_the_kubelet_gives_no_pod_list(short: Path, turned: Turned) -> None:
    """The grace period is an hour of a clock that the test advances."""

    async def story() -> None:
        async with node_in(short, SLOW.replace("check_seconds = 0.2", "check_seconds = 3600")) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 5)
            allocator = node.door.allocator
            await allocator.check(3600)
            assert [hold.pod for hold in allocator.holds] == ["a/one/main"]
            node.kubelet.listing_empty = True
            await node.kubelet.restart()
            await allocator.check(3600)
            turned.passed = 3000.0
            await allocator.check(3600)
            node.kubelet.listing_fails = True  # from here on the kubelet's list of pods fails
            turned.passed = 60000.0
            await allocator.check(3600)
            node.kubelet.listing_fails = False
            await allocator.check(3600)  # misses before the failure no longer count
            turned.passed = 63000.0
            await allocator.check(3600)
            assert gib(node) == [5]
            # the list has the pod again, so vgpud counts its absences anew
            node.kubelet.listing_empty = False
            await allocator.check(3600)
            node.kubelet.end("a/one")
            turned.passed = 64000.0
            await allocator.check(3600)
            assert gib(node) == [5]
            node.world.effectors[Mode.PRELOAD].pids = (1,)
            turned.passed = 68000.0
            await allocator.check(3600)
            assert gib(node) == [5]  # the pod's processes still run
            node.world.effectors[Mode.PRELOAD].pids = ()
            await allocator.check(3600)
            assert node.world.is_empty()
            assert not list(allocator.holds)

    run(story())


def test_a_repeated_allocate_call_makes_one_allocation(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW) as node:
            ids = sorted(await node.kubelet.healthy(UNITS, 160))[:4]
            first, second, third = await asyncio.gather(
                *(node.kubelet.allocate(UNITS, order) for order in (ids, ids[::-1], ids))
            )
            assert first == second == third
            assert gib(node) == [4]
            with pytest.raises(AdmissionError, match="only 4 are different"):
                await node.kubelet.allocate(UNITS, [*ids, ids[0]])
            with pytest.raises(AdmissionError, match="no ids"):
                await node.kubelet.allocate(UNITS, [])

    run(story())


def test_a_new_pod_with_the_ids_of_a_deleted_pod_gets_a_new_allocation(short: Path) -> None:
    """vgpud has not noticed the end of the old pod yet when the new pod asks with the same ids."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            old = await node.kubelet.admit("a/old", UNITS, 4)
            await node.until(lambda: all(hold.pod for hold in node.door.allocator.holds))
            ids = node.kubelet.in_use(UNITS)
            node.kubelet.end("a/old")
            new = await node.kubelet.admit("a/new", UNITS, 4, among=lambda name: name in ids)
            assert old.cdi_devices != new.cdi_devices
            assert gib(node) == [4]
            node.kubelet.end("a/new")
            # a third pod gets some of the ids before it is in a list of the kubelet
            await node.kubelet.admit("a/third", UNITS, 2, among=lambda name: name in ids)
            assert gib(node) == [2]

    run(story())


def test_an_allocate_call_waits_for_the_end_of_the_deleted_pods_processes(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/old", UNITS, 4)
            await node.until(lambda: all(hold.pod for hold in node.door.allocator.holds))
            ids = node.kubelet.in_use(UNITS)
            node.kubelet.end("a/old")
            alive = node.world.effectors[Mode.PRELOAD]
            alive.pids = (1,)
            asyncio.get_running_loop().call_later(0.5, setattr, alive, "pids", ())
            await node.kubelet.admit("a/new", UNITS, 4, among=lambda name: name in ids)
            assert alive.calls.count("detach") == 1
            assert gib(node) == [4]

    run(story())


def test_containers_of_a_pod_with_overlapping_ids_share_an_allocation(short: Path) -> None:
    """The kubelet gives the ids of an init container to later containers of the pod again."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            init = await node.kubelet.admit("a/b", UNITS, 2, container="init", init=True)
            ids = node.kubelet.in_use(UNITS)
            uuid = next(iter(ids)).partition("::")[0]
            more = await node.kubelet.admit(
                "a/b", UNITS, 5, "more", reusable=ids, among=lambda name: name.startswith(uuid), init=True
            )
            assert init.cdi_devices == more.cdi_devices
            assert gib(node) == [5]
            less = await node.kubelet.admit("a/b", UNITS, 1, reusable=ids)
            assert less.cdi_devices == more.cdi_devices
            assert gib(node) == [5]
            node.kubelet.listing_fails = True
            with pytest.raises(AdmissionError, match="does not say for which pods"):
                await node.kubelet.allocate(UNITS, [*ids, f"{uuid}::79"])

    run(story())


def test_an_allocation_whose_allocate_call_the_kubelet_cancelled_is_released(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            ids = sorted(await node.kubelet.healthy(UNITS, 160))[:3]
            gate = asyncio.Event()
            node.world.effectors[Mode.PRELOAD].gate = gate
            asked = dp.AllocateRequest()
            asked.container_requests.add(devices_ids=ids)
            call = node.kubelet.endpoints[UNITS].call("Allocate", asked, dp.AllocateResponse)
            await node.until(lambda: len(node.allocations) == 1)
            call.cancel()
            await node.kubelet.restart()
            gate.set()
            await node.kubelet.healthy(UNITS, 160)
            await node.until(lambda: not node.allocations)
            await node.until(lambda: not list(node.door.allocator.holds))
            assert node.world.is_empty()

    run(story())


def test_pods_keep_their_allocations_across_a_restart_of_vgpud(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 5)
            # in the second round vgpud's record of the allocation's ids is lost as well
            for lost in (False, True):
                await node.close()
                await node.kubelet.wait(lambda: node.kubelet.endpoints[UNITS].ended)
                assert not node.kubelet.endpoints[UNITS].healthy
                if lost:
                    for row in node.world.ledger.rows[RowTable.KUBELET_HOLDS]:
                        await node.world.ledger.rows[RowTable.KUBELET_HOLDS].put((row[0], "{"))
                node.open()
                healthy = await node.kubelet.healthy(UNITS, 160)
                assert node.kubelet.in_use(UNITS) <= healthy
                await node.until(
                    lambda: all(hold.pod for hold in node.door.allocator.holds) and gib(node) == [5]
                )
            await node.until(lambda: len(list(node.door.allocator.holds)) == 1)
            node.kubelet.end("a/one")
            await node.until(lambda: not node.allocations)

    run(story())


def test_a_failed_allocate_leaves_no_allocation(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            node.world.effectors[Mode.PRELOAD].fail = {"attach"}
            with pytest.raises(AdmissionError, match=r"attach was told to fail \(E601\)"):
                await node.kubelet.admit("a/one", UNITS, 5)
            assert node.world.is_empty()
            assert not list(node.door.allocator.holds)
            node.world.effectors[Mode.PRELOAD].fail = set()
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 5)

    run(story())


def test_an_unregistered_plugin_registers_as_soon_as_the_kubelet_starts(short: Path) -> None:
    """After a reboot the kubelet admits its pods soon after it starts."""

    async def story() -> None:
        async with node_in(short) as node:
            await node.close()
            await node.kubelet.stop()
            node.pace = replace(FAST, look=3600.0)
            node.open()
            await asyncio.sleep(0.2)  # vgpud looks for a kubelet, and there is none yet
            await node.kubelet.start()
            await node.kubelet.healthy(UNITS, 160)

    run(story())


def test_the_registration_is_repeated_until_the_kubelet_takes_it(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, pace=replace(FAST, unwatched=0.3)) as node:
            await node.kubelet.healthy(UNITS, 160)
            node.kubelet.refuse = "resource is taken"
            await node.kubelet.restart()
            before = len(node.kubelet.registrations)
            await node.until(lambda: len(node.kubelet.registrations) > before + 2)
            node.kubelet.refuse = ""
            await node.kubelet.healthy(UNITS, 160)
            endpoint = node.kubelet.endpoints[UNITS]
            assert endpoint.watch is not None
            endpoint.watch.cancel()
            await node.until(lambda: node.kubelet.endpoints.get(UNITS) is not endpoint)
            await node.kubelet.healthy(UNITS, 160)

    run(story())


def test_two_concurrent_listandwatch_calls_both_get_changes(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            endpoint = node.kubelet.endpoints[UNITS]
            other = asyncio.ensure_future(node.kubelet.watch(endpoint))
            await node.until(lambda: endpoint.lists == 2)
            await node.world.keeper.operations.drain(node.world.gateway.node.devices[0].uuid, True)
            await node.until(lambda: endpoint.lists >= 4 and len(endpoint.healthy) == 80)
            other.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await other

    run(story())


def test_a_hanging_kubelet_does_not_hold_up_vgpud(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.stop()
            (short / "kubelet" / "pod-resources" / "kubelet.sock").unlink(missing_ok=True)
            silent = await asyncio.start_unix_server(
                lambda reader, writer: None, fixed_plugins(short / "kubelet") / "kubelet.sock"
            )
            await node.world.keeper.listings.devices()
            assert node.task is not None
            assert not node.task.done()
            silent.close()
            (fixed_plugins(short / "kubelet") / "kubelet.sock").unlink(missing_ok=True)
            await node.kubelet.start()
            await node.kubelet.healthy(UNITS, 160)

    run(story())
