"""Sixty-four clients at once: allocations never exceed the capacity, and no request is refused while it
fits.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, TENANT, client, quota, release, states
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.gen.vgpud_pb2_grpc import VgpudStub
from vgpud.api.status import from_rpc_error
from vgpud.model.errors import ErrorCode, VgpuError

if TYPE_CHECKING:
    from vgpud.api.gen.vgpud_pb2_grpc import VgpudAsyncStub  # this type exists only in the stubs

CLIENTS = 64
Reply = TypeVar("Reply", pb.Allocation, pb.ReleaseReply)
Work = Callable[["VgpudAsyncStub", int], Awaitable[Reply]]


@pytest.fixture
def node(make_node: NodeMaker) -> DemoNode:
    node = make_node()
    node.start()
    return node


def at_once(node: DemoNode, work: Work[Reply]) -> list[Reply | VgpuError]:
    """Runs `work` once for each client, each with its own connection. Returns the replies and errors."""

    async def one(number: int) -> Reply | VgpuError:
        target = f"unix:{node.run_dir / TENANT}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            try:
                return await work(VgpudStub(channel), number)
            except grpc.RpcError as failure:
                return from_rpc_error(failure, node.run_dir / TENANT, 30)

    async def everybody() -> list[Reply | VgpuError]:
        return await asyncio.gather(*(one(number) for number in range(CLIENTS)))

    return asyncio.run(everybody())


def release_all(node: DemoNode) -> None:
    names = list(states(node))

    async def one(calls: "VgpudAsyncStub", number: int) -> pb.ReleaseReply:
        reply = pb.ReleaseReply()
        for name in names[number::CLIENTS]:
            reply = await calls.Release(pb.ReleaseRequest(allocation_id=name), timeout=300)
        return reply

    failed = [answer for answer in at_once(node, one) if isinstance(answer, VgpuError)]
    assert failed == []
    assert states(node) == {}


def allocated(node: DemoNode) -> list[int]:
    """The bytes allocated on each device. Asserts that devices and allocations agree on them, and that they
    do not exceed the usable memory.
    """
    with client(node) as calls:
        devices = calls.list_devices().devices
        held: Counter[str] = Counter()
        for allocation in calls.list_allocations().allocations:
            for part in allocation.slices:
                held[part.device_uuid] += part.memory_bytes
    for device in devices:
        assert device.memory_allocated_bytes == held[device.uuid]
        assert held[device.uuid] <= device.memory_total_bytes - device.memory_reserved_bytes
    return [held[device.uuid] for device in devices]


def test_sixty_four_clients_fill_eight_devices_to_the_last_slice(node: DemoNode) -> None:
    """Each of the eight devices has room for eight allocations, so all 64 clients get one."""
    with client(node) as calls:
        device = calls.list_devices().devices[0]
    usable = device.memory_total_bytes - device.memory_reserved_bytes
    size = usable // 8 // GIB * GIB
    assert size * 9 > usable
    answers = at_once(
        node,
        lambda calls, number: calls.Allocate(
            pb.AllocateRequest(request_id=f"r{number}", isolation="quota", memory_bytes=size), timeout=300
        ),
    )
    assert [answer for answer in answers if isinstance(answer, VgpuError)] == []
    assert allocated(node) == [8 * size] * 8
    release_all(node)
    release(node, quota(node, size // GIB).id)


def test_concurrent_clients_beyond_the_capacity_are_refused(node: DemoNode) -> None:
    """Three allocations fit on each device: 24 of 64 clients get one, and 40 are refused for lack of room."""
    answers = at_once(
        node,
        lambda calls, _: calls.Allocate(
            pb.AllocateRequest(isolation="quota", memory_bytes=45 * GIB), timeout=300
        ),
    )
    refused = [answer for answer in answers if isinstance(answer, VgpuError)]
    assert {error.code for error in refused} == {ErrorCode.NO_CAPACITY}, set(map(str, refused))
    assert len(refused) == CLIENTS - 24
    assert allocated(node) == [3 * 45 * GIB] * 8
    release_all(node)


def test_concurrent_clients_get_seven_mig_instances_of_a_device_and_no_more(node: DemoNode) -> None:
    """Seven of the smallest instances fit on a device."""
    answers = at_once(
        node,
        lambda calls, _: calls.Allocate(
            pb.AllocateRequest(isolation="hardware", mig_profile="1g.18gb"), timeout=300
        ),
    )
    refused = [answer for answer in answers if isinstance(answer, VgpuError)]
    assert {error.code for error in refused} == {ErrorCode.NO_CAPACITY}, refused
    assert len(refused) == CLIENTS - 56
    with client(node) as calls:
        assert [len(device.mig.instances) for device in calls.list_devices().devices] == [7] * 8
    release_all(node)
    with client(node) as calls:
        assert not any(device.mig.current for device in calls.list_devices().devices)


def test_a_request_id_from_sixty_four_clients_makes_one_allocation(node: DemoNode) -> None:
    answers = at_once(
        node,
        lambda calls, _: calls.Allocate(
            pb.AllocateRequest(request_id="one", isolation="quota", memory_bytes=GIB), timeout=300
        ),
    )
    made = [answer for answer in answers if not isinstance(answer, VgpuError)]
    assert len(made) == len(answers), answers
    assert {answer.id for answer in made} == set(states(node))
    assert len(states(node)) == 1
    release_all(node)


def test_concurrent_vgpuctl_runs_each_hold_and_release_their_own_allocation(node: DemoNode) -> None:
    """Of ten `vgpuctl run` processes eight get an allocation each, one on each device. All are released."""
    command = [
        "run",
        "--isolation",
        "quota",
        "--memory",
        "100GiB",
        "--",
        "sh",
        "-c",
        "echo $VGPU_ALLOCATION; read x",
    ]
    started = [node.launch_ctl(command) for _ in range(10)]
    names = {process.stdout.readline().strip() for process in started if process.stdout} - {""}
    assert names == set(states(node))
    assert len(names) == 8, "one on each device"
    for process in started:
        process.communicate(timeout=300)
    assert Counter(process.returncode for process in started) == {1: 8, 33: 2}
