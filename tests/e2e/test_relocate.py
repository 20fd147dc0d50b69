"""Making room by moving tenants: drain --move, defrag, and the moves of allocations with several slices."""

import json
import sys

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.cuda import cuda_program
from tests.e2e.support import GIB, MIB, allocate, client, eventually, quota, release, states
from tests.e2e.test_move import SHARED, SIZE_MIB, in_use, move, used_mib, uuids
from tests.e2e.test_suspend import end, goes_on, holding, resume, suspend
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.lease import read_limits, read_usage
from vgpud.model.errors import ErrorCode, VgpuError


@pytest.fixture(scope="module")
def node(shared_node: DemoNode) -> DemoNode:
    return shared_node


def on(node: DemoNode, gib: int, device: int, **asked: object) -> str:
    return quota(node, gib, selector=pb.Selector(indices=[device]), **asked).id


def places(node: DemoNode) -> dict[str, list[int]]:
    index = {uuid: i for i, uuid in enumerate(uuids(node))}
    with client(node) as calls:
        return {
            one.id: [index[part.device_uuid] for part in one.slices]
            for one in calls.list_allocations().allocations
        }


# --- drain


def eventually_holds(node: DemoNode, index: int, mib: int) -> None:
    eventually(lambda: used_mib(node)[index] == mib, f"NVML says that {mib} MiB of device {index} are used")


@needs("driver-580")
def test_a_drain_moves_tenants_and_reports_those_that_stay(node: DemoNode) -> None:
    tenant, name = holding(node, 0, *SHARED, "0", size_mib=SIZE_MIB)
    large = on(node, 100, 0)
    elsewhere = on(node, 60, 1)
    pod = on(node, 1, 0, request_id="kubelet/pod")
    sleeping = on(node, 2, 0)
    suspend(node, sleeping)
    drained = node.ctl("drain", "0", "--move", "-o", "json", check=False)
    assert drained.returncode == 1
    said = json.loads(drained.stdout)
    assert [one["allocationId"] for one in said["moved"]] == [large, name, sleeping]
    why = {one["allocationId"]: one["why"] for one in said["staying"]}
    assert why.keys() == {pod}
    assert "kubelet" in why[pod]
    where = places(node)
    # 60 GiB are in use on the other devices, which leaves too little for the large tenant
    assert where[large] == [2]
    assert where[name] == [2]  # of the devices with enough free memory, device 2 is the fullest
    assert where[sleeping] == [2]
    assert states(node)[sleeping] == "suspended"
    assert goes_on(tenant)
    release(node, large, elsewhere, pod, sleeping)
    node.ctl("undrain", "0")
    end(node, tenant, name)


@needs("driver-580")
def test_a_drain_reports_a_tenant_that_fits_on_no_other_device(node: DemoNode) -> None:
    """A suspended tenant needs no memory now, but it moves only to a device where it could be resumed at
    once.
    """
    sleeping = on(node, 45, 3)
    suspend(node, sleeping)
    held = [on(node, 90 if device == 6 else 100, device) for device in range(8)]
    said = json.loads(node.ctl("drain", "3", "--move", "-o", "json", check=False).stdout)
    assert [one["allocationId"] for one in said["moved"]] == [sleeping]
    assert "fit in the" in said["staying"][0]["why"]
    assert places(node)[sleeping] == [6]
    node.ctl("undrain", "3")
    release(node, *held, sleeping)


# --- defrag


@needs("driver-580")
def test_a_defrag_makes_room_for_a_request(node: DemoNode) -> None:
    """Two devices have 70 and 80 GiB free, and a request asks for 100 GiB."""
    tenant, name = holding(
        node, 0, "--isolation", "quota", "--memory", "70GiB", "--device", "0", size_mib=SIZE_MIB
    )
    others = [on(node, 60, 1), *(on(node, 130, device) for device in range(2, 8))]
    with client(node) as calls:
        with pytest.raises(VgpuError) as refused:
            calls.allocate(pb.AllocateRequest(isolation="quota", memory_bytes=100 * GIB))
        assert refused.value.code is ErrorCode.NO_CAPACITY
    planned = json.loads(node.ctl("defrag", "--memory", "100GiB", "--dry-run", "-o", "json").stdout)
    assert [one["done"] for one in planned["moves"]] == [False]
    assert places(node)[name] == [0]
    done = json.loads(node.ctl("defrag", "--memory", "100GiB", "-o", "json").stdout)
    assert [one["done"] for one in done["moves"]] == [True]
    got = allocate(node, isolation="quota", memory_bytes=100 * GIB)
    assert got.slices[0].device_uuid == done["deviceUuid"]
    assert goes_on(tenant)
    with client(node) as calls, pytest.raises(VgpuError) as full:
        calls.plan_defrag(pb.DefragRequest(memory_bytes=100 * GIB))
    assert full.value.code is ErrorCode.NO_CAPACITY
    release(node, got.id, *others)
    end(node, tenant, name)


def test_a_defrag_for_a_drained_device_says_that_it_is_drained(node: DemoNode) -> None:
    node.ctl("drain", "3")
    refused = node.ctl("defrag", "--device", "3", check=False)
    node.ctl("undrain", "3")
    assert "device 3 takes no tenants: it is drained (E401)" in refused.stderr
    assert "'vgpuctl undrain 3' opens it" in refused.stderr


@needs("driver-580")
def test_a_defrag_frees_a_whole_device(node: DemoNode) -> None:
    held = [on(node, 10, device) for device in range(8)]
    with client(node) as calls:
        (only,) = calls.defrag(pb.DefragRequest(selector=pb.Selector(indices=[5]))).moves
    assert only.allocation_id == held[5]
    assert [5] not in places(node).values()
    whole = allocate(node, isolation="device")
    assert whole.slices[0].device_uuid == uuids(node)[5]
    release(node, whole.id, *held)


# --- several slices

PAIR = cuda_program("""
contexts, memories, SIZE = [c.c_void_p() for _ in range(2)], [c.c_uint64() for _ in range(2)], 16 << 20
call("cuInit", 0)
for i in range(2):
    call("cuDevicePrimaryCtxRetain", c.byref(contexts[i]), i)
    call("cuCtxSetCurrent", contexts[i])
    call("cuMemAlloc_v2", c.byref(memories[i]), c.c_size_t(SIZE))
    call("cuMemsetD32_v2", memories[i], c.c_uint(7 + i), c.c_size_t(SIZE // 4))
able = c.c_int()
call("cuDeviceCanAccessPeer", c.byref(able), 0, 1)
call("cuCtxSetCurrent", contexts[0])
call("cuCtxEnablePeerAccess", contexts[1], 0)
say(peers=able.value)
for line in sys.stdin:
    back, found, more = (c.c_uint32 * 4)(), [], c.c_uint64()
    for i in range(2):
        call("cuCtxSetCurrent", contexts[i])
        call("cuMemcpyDtoH_v2", back, memories[i], c.c_size_t(16))
        found.append(back[0])
        if line.strip() and u.cuMemAlloc_v2(c.byref(more), c.c_size_t(int(line) << 20)): found.append("full")
    call("cuCtxSetCurrent", contexts[0])
    call("cuMemcpyPeer", memories[0], contexts[0], memories[1], contexts[1], c.c_size_t(16))
    call("cuMemsetD32_v2", memories[0], c.c_uint(7), c.c_size_t(4))
    say(found=found)
""")


def pair(node: DemoNode, *devices: int) -> tuple[Tenant, str]:
    before = states(node)
    asked = ["--isolation", "quota", "--memory", "2GiB", "--count", "2"]
    for device in devices:
        asked += ["--device", str(device)]
    tenant = node.tenant(asked, [sys.executable, "-c", PAIR])
    assert tenant.line() == {"peers": 1}
    (new,) = states(node).keys() - before.keys()
    return tenant, new


def looks(tenant: Tenant, more: str = "") -> list[object]:
    assert tenant.process.stdin is not None
    tenant.process.stdin.write(f"{more}\n")
    tenant.process.stdin.flush()
    found: list[object] = tenant.line()["found"]
    return found


@needs("driver-580")
def test_an_allocation_of_two_slices_is_limited_and_moved_as_a_whole(node: DemoNode) -> None:
    tenant, name = pair(node, 2, 5)
    assert places(node)[name] == [2, 5]
    assert looks(tenant) == [7, 8]
    suspend(node, name)
    eventually(lambda: in_use(node) == [], "nothing is left on either")
    resume(node, name)
    assert looks(tenant) == [7, 8]
    for to, source in (((3, 6), None), ((6, 3), None), ((4,), 6), ((2, 5), None)):
        if to == (6, 3):  # this move would put both slices on one device
            with pytest.raises(VgpuError):
                move(node, name, *to)
            continue
        move(node, name, *to, source="" if source is None else uuids(node)[source])
        assert looks(tenant) == [7, 8]
    assert places(node)[name] == [2, 5]
    assert looks(tenant, "1000") == [7, 8]
    # each slice has less than 1000 MiB of its 2 GiB left, because the context counts too
    assert looks(tenant, "1000") == [7, "full", 8, "full"]
    usage = read_usage(node.run_dir / "leases" / name)
    for ordinal, index in enumerate((2, 5)):
        meter = usage.device(ordinal)
        held = (meter.used_bytes + meter.context_bytes) // MIB
        eventually_holds(node, index, held)
    end(node, tenant, name)
    assert not (node.run_dir / "leases" / name).exists()
    eventually(lambda: in_use(node) == [], "both are released together")


@needs("driver-580")
def test_a_move_of_one_of_several_slices_keeps_their_order_in_the_lease(node: DemoNode) -> None:
    held = quota(node, 1, count=3, selector=pb.Selector(indices=[0, 1, 2]))
    first = [part.device_uuid for part in held.slices]
    moved = move(node, held.id, 7, source=first[1])
    assert [part.device_uuid for part in moved.slices] == [first[0], uuids(node)[7], first[2]]
    lease = read_limits(node.run_dir / "leases" / held.id)
    assert [d.uuid for d in lease.devices] == [part.device_uuid for part in moved.slices]
    release(node, held.id)
