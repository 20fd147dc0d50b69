"""Allocations for the device plugin and the containers that run with them, as the CDI hooks report the
containers.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kubelet.conftest import FAST, MEMORY, NODE, Node, Turned, node_in, run
from tests.kubelet.double import AdmissionError
from tests.kubelet.test_plugin import CARDS, four_cards
from tests.node.world import request
from vgpud.ledger import RowTable
from vgpud.model.device import Health
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Lifetime, Selector, State
from vgpud.proc import start_ticks

UNITS = "vgpud.io/memory-gib"
GPU = "vgpud.io/gpu"
SLOW = MEMORY.replace("release_seconds = 1", "release_seconds = 3600")


@contextmanager
def container() -> Iterator[Lifetime]:
    """Starts a process that stands for the container's init, and yields the identity of the process."""
    with subprocess.Popen(["sleep", "600"]) as init:
        ticks = start_ticks(init.pid)
        assert ticks is not None
        try:
            yield Lifetime(init.pid, ticks)
        finally:
            init.kill()


async def start(node: Node, pod: str, init: Lifetime, allocation: int = 0) -> None:
    """Tells vgpud the start of a container, as the createRuntime hook in the allocation's CDI spec does."""
    assert await node.door.allocator.bind(node.allocations[allocation].id, init, pod)


def sizes(node: Node) -> list[int]:
    return sorted(a.slices[0].memory_bytes // GIB for a in node.allocations)


@pytest.mark.parametrize(("first", "then"), [(2, 5), (5, 2), (3, 3), (1, 7)])
def test_an_init_container_keeps_its_allocation_when_later_containers_ask(
    short: Path, first: int, then: int
) -> None:
    """The kubelet admits all containers of a pod before the first one starts. PodResources does not list
    plain init containers.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            for pod in ("a/one", "a/two"):  # the second pod starts while the first one is running
                before = {a.id for a in node.allocations}
                init = await node.kubelet.admit(pod, UNITS, first, container="init", init=True)
                ids = node.kubelet.held[pod, "init", UNITS]
                uuid = next(iter(ids)).partition("::")[0]
                main = await node.kubelet.admit(
                    pod,
                    UNITS,
                    then,
                    reusable=ids,
                    among=lambda name, u=uuid: name.startswith(u),  # type: ignore[misc]
                )
                assert init.cdi_devices == main.cdi_devices
                (made,) = [a for a in node.allocations if a.id not in before]
                assert made.slices[0].memory_bytes == max(first, then) * GIB

    run(story())


def test_the_container_after_an_init_container_gets_the_cards_of_the_init_container(short: Path) -> None:
    """The kubelet keeps for the later container the CDI name that it got for the init container."""

    async def story() -> None:
        async with node_in(short, CARDS, four_cards()) as node:
            await node.kubelet.healthy(GPU, 4)
            init = await node.kubelet.admit("a/b", GPU, 1, container="init", init=True)
            ids = node.kubelet.held["a/b", "init", GPU]
            main = await node.kubelet.admit("a/b", GPU, 3, reusable=ids)
            assert init.cdi_devices == main.cdi_devices
            (held,) = node.allocations
            assert len(held.slices) == 3
            assert ids <= {part.device_uuid for part in held.slices}
            assert node.world.specs() == [f"vgpud.io-vgpu_{held.id}.json"]
            with container() as first:
                await start(node, "a/b/init", first)
            with container() as second:
                await start(node, "a/b/main", second)
                assert node.allocations == (await node.world.keeper.allocate(held.request),)
            node.kubelet.end("a/b")
            await node.until(lambda: not node.allocations)
            assert node.world.is_empty()

    run(story())


def test_an_init_containers_cards_are_released_if_the_container_after_it_cannot_have_more(
    short: Path,
) -> None:
    async def story() -> None:
        async with node_in(short, CARDS, four_cards()) as node:
            cards = set(await node.kubelet.healthy(GPU, 4))
            await node.kubelet.admit("a/b", GPU, 1, container="init", init=True)
            other = min(cards - node.kubelet.held["a/b", "init", GPU])
            taken = await node.world.keeper.allocate(replace(request("x"), selector=Selector(uuids=(other,))))
            with pytest.raises(AdmissionError, match="E4"):
                await node.kubelet.allocate(GPU, cards)
            assert node.allocations == (taken,)

    run(story())


@pytest.mark.parametrize("other", ["with a GPU", "without one"])
def test_the_end_of_another_pod_during_an_admission_releases_nothing_of_the_admitted_pod(
    short: Path, other: str
) -> None:
    """On a busy node, other pods may end between the Allocate calls for two containers of one pod."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            if other == "with a GPU":
                await node.kubelet.admit("a/other", UNITS, 3)
                await node.until(lambda: any(hold.pod for hold in node.door.allocator.holds))
            else:
                node.kubelet.active.add("a/other")
            init = await node.kubelet.admit("a/b", UNITS, 2, container="init", init=True)
            ids = node.kubelet.held["a/b", "init", UNITS]
            uuid = next(iter(ids)).partition("::")[0]
            node.kubelet.end("a/other")
            main = await node.kubelet.admit(
                "a/b", UNITS, 5, reusable=ids, among=lambda name: name.startswith(uuid)
            )
            assert init.cdi_devices == main.cdi_devices
            assert 5 in sizes(node)

    run(story())


def test_the_allocation_of_a_pod_whose_init_container_alone_asked_lasts_to_the_pods_end(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5, container="init", init=True)
            with container() as init:
                await start(node, "a/b/init", init)
                # for 1.6 s PodResources omits the pod, while release_seconds is 1
                for _ in range(8):
                    await asyncio.sleep(0.2)
                    assert sizes(node) == [5]
            # the container has ended, but may be started again as long as its pod exists
            await node.door.allocator.check(0.0, settled=True)
            assert sizes(node) == [5]
            node.kubelet.end("a/b")
            await node.until(lambda: not node.allocations)
            assert node.world.is_empty()

    run(story())


def test_an_init_container_may_start_long_after_its_admission(short: Path, turned: Turned) -> None:
    """The image of an init container may be pulled first, and PodResources never lists the init container."""

    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5, container="init", init=True)
            for _ in range(4):
                turned.passed += 100.0
                await node.door.allocator.check(1.0)
                assert sizes(node) == [5]
            node.kubelet.end("a/b")
            await node.until(lambda: not node.allocations)

    run(story())


def test_the_end_of_a_pods_last_container_releases_at_once(short: Path) -> None:
    """release_seconds and check_seconds are an hour, so only the end of the container can cause the
    release.
    """

    async def story() -> None:
        slow = SLOW.replace("check_seconds = 0.2", "check_seconds = 3600")
        async with node_in(short, slow) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            for life in range(2):  # the pod starts the container again
                with container() as init:
                    await start(node, "a/b/main", init)
                await node.until(node.door.allocator.waits_for_a_pod)
                await asyncio.sleep(0.1)
                assert sizes(node) == [5], life
            node.kubelet.end("a/b")
            await node.until(lambda: not list(node.door.allocator.holds))
            assert node.world.is_empty()

    run(story())


def test_a_restarted_vgpud_trusts_the_pod_list_of_a_kubelet_that_has_run_for_long(short: Path) -> None:
    """Only soon after its start may a kubelet's list lack pods. vgpud trusts the list of an older kubelet at
    once.
    """

    async def story() -> None:
        async with node_in(short, SLOW, pace=replace(FAST, settled=60.0)) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", init)
            await node.until(node.door.allocator.waits_for_a_pod)
            await node.close()
            node.kubelet.end("a/b")
            assert sizes(node) == [5]
            node.kubelet.looks_old()
            node.open()
            await node.until(lambda: not node.allocations)

    run(story())


def test_a_pod_that_a_restarted_kubelet_has_listed_is_released_when_no_longer_listed(short: Path) -> None:
    """Once a kubelet has listed a pod, vgpud trusts its lists without the pod, even soon after the kubelet's
    start.
    """

    async def story() -> None:
        async with node_in(short, SLOW, pace=replace(FAST, settled=3600.0)) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", init)
            await node.kubelet.restart()
            await node.kubelet.healthy(UNITS, 160)
            before = node.kubelet.listings
            await node.until(lambda: node.kubelet.listings > before + 1)
            node.kubelet.end("a/b")
            await node.until(lambda: not node.allocations)

    run(story())


def test_a_pod_that_a_newly_started_kubelet_lists_only_once_is_released_at_its_end(short: Path) -> None:
    """The only list with the pod is the one from which vgpud learns the name of the allocation's pod."""

    async def story() -> None:
        slow = SLOW.replace("check_seconds = 0.2", "check_seconds = 3600")
        async with node_in(short, slow, pace=replace(FAST, settled=3600.0)) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            await node.until(lambda: not node.door.allocator.waits_for_a_pod())
            with container() as init:
                await start(node, "a/b/main", init)
                node.kubelet.end("a/b")
            await node.until(lambda: not node.allocations)

    run(story())


@pytest.mark.parametrize("init", [False, True])
def test_a_new_pod_of_the_same_name_does_not_inherit_the_old_ones_allocation(short: Path, init: bool) -> None:
    """Pods of a StatefulSet keep their names, and PodResources identifies pods only by name."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/web-0", UNITS, 5, container="c", init=init)
            ids = node.kubelet.held["a/web-0", "c", UNITS]
            with container() as first:
                await start(node, "a/web-0/c", first)
            node.kubelet.end("a/web-0")
            await node.kubelet.admit(
                "a/web-0", UNITS, 4, container="c", init=init, among=lambda name: name not in ids
            )
            (new,) = [i for i, a in enumerate(node.allocations) if a.slices[0].memory_bytes == 4 * GIB]
            with container() as second:
                await start(node, "a/web-0/c", second, new)
                await node.until(lambda: sizes(node) == [4])

    run(story())


def test_ids_that_the_kubelet_gives_twice_enlarge_no_allocation(short: Path) -> None:
    """The kubelet forgets the ids of an Allocate call under way if it is asked for its list after a pod has
    ended.
    """

    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/one", UNITS, 4)
            ids = sorted(node.kubelet.held["a/one", "main", UNITS])
            uuid = ids[0].partition("::")[0]
            with pytest.raises(AdmissionError, match="a/one/main"):
                await node.kubelet.admit(
                    "a/two", UNITS, 3, reusable=ids[:1], among=lambda name: name.startswith(uuid)
                )
            assert sizes(node) == [4]

    run(story())


@pytest.mark.parametrize("fewer", [True, False])
def test_a_pod_created_again_before_the_first_started_has_what_it_asks_for(short: Path, fewer: bool) -> None:
    """The new pod has the name of the first one and some of its ids. It is admitted within the time in which
    vgpud expects a call for another container of the first pod.
    """

    async def story() -> None:
        async with node_in(short, MEMORY.replace("check_seconds = 0.2", "check_seconds = 3600")) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/web-0", UNITS, 4)
            (hold,) = node.door.allocator.holds
            await node.until(lambda: all(one.pod for one in node.door.allocator.holds))
            node.kubelet.end("a/web-0")
            freed = sorted(hold.ids)
            reusable = freed[:2] if fewer else freed
            uuid = freed[0].partition("::")[0]
            await node.kubelet.admit(
                "a/web-0",
                UNITS,
                2 if fewer else 6,
                reusable=reusable,
                among=lambda name: name.startswith(uuid),
            )
            assert sizes(node) == [2 if fewer else 6]
            (again,) = node.door.allocator.holds
            assert again.ids == node.kubelet.held["a/web-0", "main", UNITS]

    run(story())


def test_a_pod_without_a_gpu_keeps_nothing_of_an_earlier_pod_of_its_name(short: Path, tmp_path: Path) -> None:
    """The control group of the first pod is gone, and the containers of the second one have other names."""
    group = tmp_path / "pod12345678-aaaa" / "c"

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/web-0", UNITS, 5, container="init", init=True)
            group.mkdir(parents=True)
            with container() as first:
                init = replace(first, cgroup=f"{group.stat().st_ino} {group}")
                await start(node, "a/web-0/init", init)
            # the pod is created again within the interval of the checks, so the list has its name all the
            # time
            await node.until(lambda: not node.door.allocator.started.lives(node.allocations[0].request.id))
            assert sizes(node) == [5], "the init container may run again"
            shutil.rmtree(group.parent)
            await node.until(lambda: not node.allocations)

    run(story())


def test_a_pod_deleted_by_force_keeps_its_allocation_while_its_container_runs(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", init)
                node.kubelet.end("a/b")
                for _ in range(8):
                    await asyncio.sleep(0.2)
                    assert sizes(node) == [5]
            await node.until(lambda: not node.allocations)

    run(story())


def test_a_kubelet_that_lost_its_checkpoint_cannot_give_away_a_running_containers_ids(short: Path) -> None:
    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            ids = node.kubelet.in_use(UNITS)
            with container() as init:
                await start(node, "a/b/main", init)
                # the kubelet loses its record of the ids, while the pod keeps running
                node.kubelet.held.clear()
                await node.kubelet.restart()
                await node.kubelet.healthy(UNITS, 160)
                with pytest.raises(AdmissionError, match=r"held by a/b/main, which has started.*E304"):
                    await node.kubelet.admit("a/c", UNITS, 5, among=lambda name: name in ids)
                # the running container's ids are not offered to other pods
                assert not ids & await node.kubelet.healthy(UNITS, 155)
                await node.kubelet.admit("a/c", UNITS, 4)
                assert sizes(node) == [4, 5]
                # after its own restart vgpud still knows that the container runs
                await node.close()
                node.open()
                await node.kubelet.healthy(UNITS, 160)
                for _ in range(8):
                    await asyncio.sleep(0.2)
                    assert sizes(node) == [4, 5]
                os.kill(init.pid, signal.SIGKILL)
            node.kubelet.end("a/b")
            await node.until(lambda: sizes(node) == [4])

    run(story())


@pytest.mark.parametrize("common", [1, 2])
def test_after_a_kill_of_the_kubelet_in_an_admission_each_pod_gets_its_own_limit(
    short: Path, common: int
) -> None:
    """The killed kubelet gave out device ids that are missing in its checkpoint. The new kubelet admits the
    pods again, and each pod gets what it asks for, not the sum.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            k.active |= {"a/first", "a/second"}
            await k.admit("a/first", UNITS, 6)
            lost = k.held.pop(("a/first", "main", UNITS))
            await k.restart()
            await k.healthy(UNITS, 160)
            card = next(iter(lost)).partition("::")[0]
            others = sorted(one for one in k.endpoints[UNITS].healthy - lost if one.startswith(card))
            second = {*sorted(lost)[:common], *others[: 2 - common]}
            await k.admit("a/second", UNITS, 2, among=lambda one: one in second)
            assert sizes(node) == [2]
            await k.admit("a/first", UNITS, 6)
            assert sizes(node) == [2, 6]

    run(story())


def test_a_pod_is_refused_if_vgpud_is_restarted_during_its_admission(short: Path) -> None:
    """The kubelet asks for one container before the restart, and for another one after it. They may belong to
    two pods, the first of which was refused.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            k.active.add("a/b")
            await k.admit("a/b", UNITS, 2, container="init", init=True)
            ids = k.held["a/b", "init", UNITS]
            (made,) = node.allocations
            await node.close()
            node.open()
            await k.wait(lambda: len(k.registrations) == 2)
            await k.healthy(UNITS, 160)
            card = next(iter(ids)).partition("::")[0]
            with pytest.raises(AdmissionError, match=r"does not say for which pods.*E304"):
                await k.admit("a/b", UNITS, 5, reusable=ids, among=lambda one: one.startswith(card))
            assert (node.allocations, sizes(node)) == ((made,), [2])

    run(story())


@pytest.mark.parametrize("common", [1, 2])
def test_a_pod_refused_while_vgpud_was_down_leaves_no_limit_to_the_next_pod(short: Path, common: int) -> None:
    """vgpud is killed after it has made the allocation of the first pod, and the kubelet refuses that pod.
    The next pod gets `common` of its ids.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            await k.admit("a/first", UNITS, 6)
            lost = k.held["a/first", "main", UNITS]
            await node.close()
            k.end("a/first")
            node.open()
            await k.wait(lambda: len(k.registrations) == 2)
            await k.healthy(UNITS, 160)
            card = next(iter(lost)).partition("::")[0]
            others = sorted(one for one in k.endpoints[UNITS].healthy - lost if one.startswith(card))
            second = {*sorted(lost)[:common], *others[: 2 - common]}
            await k.admit("a/second", UNITS, 2, among=lambda one: one in second)
            assert sizes(node) == [2]

    run(story())


@pytest.mark.parametrize("asked", [2, 5])
def test_a_pod_is_refused_while_the_kubelet_lists_no_pods(short: Path, asked: int) -> None:
    """The allocation with these ids may belong to another pod and have another size."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            k.listing_empty = True
            await k.healthy(UNITS, 160)
            await k.admit("a/first", UNITS, 3)
            ids = k.held.pop(("a/first", "main", UNITS))
            card = next(iter(ids)).partition("::")[0]
            with pytest.raises(AdmissionError, match=r"does not say for which pods.*E304"):
                await k.admit("a/second", UNITS, asked, reusable=ids, among=lambda one: one.startswith(card))
            assert sizes(node) == [3]

    run(story())


def test_an_admission_with_only_some_ids_of_an_earlier_container_belongs_to_another_pod(short: Path) -> None:
    """A later container of the same pod gets either all ids of the init container and perhaps more, or only
    ids of the init container. Here it gets some of them and others besides, so it is in another pod.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            await k.admit("a/first", UNITS, 3)
            lost = sorted(k.held.pop(("a/first", "main", UNITS)))
            card = lost[0].partition("::")[0]
            others = [one for one in k.endpoints[UNITS].healthy if one.startswith(card) and one not in lost]
            second = {*lost[:2], *sorted(others)[:2]}
            await k.admit("a/first", UNITS, 4, container="other", among=lambda one: one in second)
            assert sizes(node) == [4]

    run(story())


def test_a_pod_made_in_the_place_of_a_refused_one_keeps_the_allocation_of_its_init_container(
    short: Path,
) -> None:
    """vgpud is killed after it has made the first pod's allocation, and that pod is refused. The kubelet
    gives the ids of the first pod to the init container of the second pod. The next container of the second
    pod gets these ids and more.
    """

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            await k.admit("a/first", UNITS, 2)
            ids = k.held["a/first", "main", UNITS]
            await node.close()
            k.end("a/first")
            node.open()
            await k.wait(lambda: len(k.registrations) == 2)
            await k.healthy(UNITS, 160)
            init = await k.admit("a/second", UNITS, 2, container="init", init=True, among=ids.__contains__)
            card = next(iter(ids)).partition("::")[0]
            main = await k.admit("a/second", UNITS, 5, reusable=ids, among=lambda one: one.startswith(card))
            assert (init.cdi_devices, sizes(node)) == (main.cdi_devices, [5])

    run(story())


POD = "kubepods-burstable-pod01234567_89ab_cdef_0123_456789abcdef.slice"


def in_group(init: Lifetime, folder: Path) -> Lifetime:
    """A copy of the identity `init`, in a new control group below `folder` with a name like the kubelet's for
    a pod.
    """
    group = folder / POD / "cri-containerd-0123.scope" / "container"
    group.mkdir(parents=True, exist_ok=True)
    return replace(init, cgroup=f"{group.stat().st_ino} {group}")


def test_the_absence_of_its_control_group_shows_that_a_pod_ended_while_no_kubelet_ran(short: Path) -> None:
    """vgpud does not trust the list of the new kubelet for an hour. The kubelet removes the pod's control
    group.
    """

    async def story() -> None:
        slow = SLOW.replace("check_seconds = 0.2", "check_seconds = 3600")
        async with node_in(short, slow, pace=replace(FAST, settled=3600.0)) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            await k.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", in_group(init, short))
                await k.stop()
            k.end("a/b")
            await node.until(node.door.allocator.waits_for_a_pod)
            await k.start()
            await k.healthy(UNITS, 160)
            before = k.listings
            await node.until(lambda: k.listings > before + 5)
            assert sizes(node) == [5]
            shutil.rmtree(short / POD)
            await node.until(lambda: not node.allocations)
            await node.until(lambda: not list(node.world.ledger.rows[RowTable.CONTAINERS]))

    run(story())


def test_a_restarted_vgpud_still_knows_the_control_groups_of_pods(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW, pace=replace(FAST, settled=3600.0)) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", in_group(init, short))
            await node.until(node.door.allocator.waits_for_a_pod)
            await node.close()
            node.kubelet.end("a/b")
            shutil.rmtree(short / POD)
            node.open()
            await node.until(lambda: not node.allocations)

    run(story())


@pytest.mark.parametrize("began", [False, True])
def test_a_kubelet_that_lists_only_static_pods_ends_no_allocation(
    short: Path, began: bool, turned: Turned
) -> None:
    """A kubelet that starts while its API server is down knows only the static pods. Other pods whose
    containers have ended may start them again later.
    """

    async def story() -> None:
        async with node_in(short) as node:
            k = node.kubelet
            await k.healthy(UNITS, 160)
            await k.admit("a/b", UNITS, 5)
            if began:
                with container() as init:
                    await start(node, "a/b/main", init)
                await node.until(node.door.allocator.waits_for_a_pod)
            await k.stop()
            known, k.active = k.active, {f"kube-system/etcd-{NODE}"}
            await k.start()
            await k.healthy(UNITS, 160)
            for _ in range(3):
                turned.passed += 100.0
                await node.door.allocator.check(1.0, settled=True)
                assert sizes(node) == [5]
            k.active = known - {"a/b"}
            await node.until(lambda: not node.allocations)

    run(story())


def test_the_first_lists_of_a_new_kubelet_end_no_pod_that_its_predecessor_listed(short: Path) -> None:
    """A new kubelet answers PodResources before its start is visible in its folder of plugins."""

    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", init)
            await node.until(node.door.allocator.waits_for_a_pod)
            await node.door.allocator.check(0.0, settled=True)
            await node.kubelet.stop()
            node.kubelet.active.clear()
            await node.kubelet.start_listing()
            await node.door.allocator.check(0.0, settled=True)
            assert sizes(node) == [5]

    run(story())


def test_a_container_process_that_its_runtime_lost_does_not_keep_the_allocation(short: Path) -> None:
    """A container runtime that is killed while it creates a container leaves an init process that waits for
    ever and has not called exec.
    """

    async def story() -> None:
        async with node_in(short) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            words = ["bash", "-c", "exec 3<&0; (read -r _ <&3) & echo $!; wait"]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runtime:
                assert runtime.stdout is not None
                pid = int(runtime.stdout.readline())
                ticks = start_ticks(pid)
                assert ticks is not None
                await start(node, "a/b/main", Lifetime(pid, ticks))
                assert node.door.allocator.started.lives(node.allocations[0].request.id)
                node.kubelet.end("a/b")
                await node.until(lambda: not node.allocations)

    run(story())


def test_a_container_of_another_pod_does_not_start_in_an_allocation(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            with container() as init:
                await start(node, "a/b/main", init)
                with pytest.raises(VgpuError, match=r"belongs to a/b/main") as refused:
                    await start(node, "a/c/main", init)
                assert refused.value.code is ErrorCode.ALLOCATION_BUSY
                await start(node, "a/b/later", init)

    run(story())


def test_a_container_of_a_failed_allocation_does_not_start(short: Path) -> None:
    async def story() -> None:
        async with node_in(short, SLOW) as node:
            await node.kubelet.healthy(UNITS, 160)
            await node.kubelet.admit("a/b", UNITS, 5)
            (held,) = node.allocations
            well = node.world.gateway.node
            lost = tuple(replace(device, health=Health.LOST) for device in well.devices)
            node.world.gateway.node = replace(well, devices=lost)
            await node.until(lambda: node.allocations[0].state is State.FAILED)
            with container() as init:
                with pytest.raises(VgpuError) as refused:
                    await node.door.allocator.bind(held.id, init, "a/b/main")
                assert refused.value.code is ErrorCode.ALLOCATION_BUSY
                assert not await node.door.allocator.bind("another-doors", init, "")

    run(story())
