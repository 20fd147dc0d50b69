"""Wrong, impossible and repeated requests, sent by vgpuctl and by gRPC."""

import math
from collections.abc import Iterator

import pytest

from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, allocate, client, quota, release, states
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node()
    node.start()
    return node


@pytest.fixture(autouse=True)
def nothing_is_held(node: DemoNode) -> Iterator[None]:
    """Asserts after each test that the refused requests have left no allocation."""
    yield
    assert states(node) == {}
    assert list((node.run_dir / "leases").iterdir()) == []
    assert list((node.folder / "cdi").glob("*.json")) == []


@pytest.mark.parametrize("text", ["10G", "10g"])
def test_a_memory_size_with_a_bare_letter_is_refused(node: DemoNode, text: str) -> None:
    refused = node.ctl("alloc", "--memory", text, check=False)
    assert refused.returncode == 2
    assert "E101" in refused.stderr
    assert "10GiB" in refused.stderr
    assert "10GB" in refused.stderr


@pytest.mark.parametrize("text", ["0m", "0MiB", "abc", "NaN", "-1GiB", "1e400GiB", "1.0000000001GiB", ""])
def test_an_invalid_memory_size_is_refused(node: DemoNode, text: str) -> None:
    refused = node.ctl("alloc", f"--memory={text}", check=False)
    assert refused.returncode == 2, refused.stderr
    assert "E101" in refused.stderr


@pytest.mark.parametrize("text", ["0", "-5", "NaN", "100.5", "abc", "33.333", "inf"])
def test_an_invalid_compute_share_is_refused(node: DemoNode, text: str) -> None:
    refused = node.ctl("alloc", "--memory", "1GiB", f"--cores={text}", check=False)
    assert refused.returncode == 2, refused.stderr
    assert "E102" in refused.stderr


WRONG = [
    (pb.AllocateRequest(memory_bytes=0), ErrorCode.BAD_QUANTITY),
    (pb.AllocateRequest(memory_bytes=2**64 - 1), ErrorCode.BAD_QUANTITY),
    (pb.AllocateRequest(memory_bytes=2**50, isolation="quota"), ErrorCode.IMPOSSIBLE),
    (pb.AllocateRequest(share_percent=0), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(share_percent=-1), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(share_percent=math.nan), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(share_percent=math.inf), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(share_percent=100.01), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(share_percent=33.333), ErrorCode.BAD_PERCENT),
    (pb.AllocateRequest(count=1000), ErrorCode.BAD_REQUEST),
    (pb.AllocateRequest(isolation="much"), ErrorCode.BAD_REQUEST),
    (pb.AllocateRequest(request_id="x" * 10_000), ErrorCode.BAD_REQUEST),
    (pb.AllocateRequest(label="x" * 100_000), ErrorCode.BAD_REQUEST),
    (pb.AllocateRequest(isolation="hardware", mig_profile="9g.999gb"), ErrorCode.IMPOSSIBLE),
    (pb.AllocateRequest(selector=pb.Selector(indices=[99])), ErrorCode.NO_SUCH_DEVICE),
    (pb.AllocateRequest(selector=pb.Selector(uuids=["GPU-none"])), ErrorCode.NO_SUCH_DEVICE),
    (pb.AllocateRequest(selector=pb.Selector(name_glob="*A100*")), ErrorCode.NO_SUCH_DEVICE),
    (pb.AllocateRequest(owner_uid=5), ErrorCode.BAD_REQUEST),
]


@pytest.mark.parametrize(("asked", "code"), WRONG, ids=[" ".join(str(w[0]).split())[:30] for w in WRONG])
def test_invalid_requests_that_other_clients_send_by_grpc_are_refused(
    node: DemoNode, asked: pb.AllocateRequest, code: ErrorCode
) -> None:
    with client(node) as calls, pytest.raises(VgpuError) as refused:
        calls.allocate(asked)
    assert refused.value.code is code
    assert refused.value.hint


def test_a_request_above_the_card_names_the_largest_size_that_fits(node: DemoNode) -> None:
    refused = node.ctl("alloc", "--isolation", "quota", "--memory", "10TiB", check=False)
    assert refused.returncode == 33
    assert "E402" in refused.stderr
    with client(node) as calls:
        device = calls.list_devices().devices[0]
    usable = (device.memory_total_bytes - device.memory_reserved_bytes) / GIB
    offered = [w for line in refused.stderr.splitlines() if line.startswith("hint") for w in line.split()]
    sizes = [float(word.removesuffix("GiB").strip(",")) for word in offered if "GiB" in word]
    assert any(usable - 1 < size <= usable for size in sizes), refused.stderr


def test_a_full_device_names_the_memory_left(node: DemoNode) -> None:
    held = quota(node, 100)
    refused = node.ctl("alloc", "--isolation", "quota", "--device", "0", "--memory", "100GiB", check=False)
    assert refused.returncode == 33
    assert "E401" in refused.stderr
    assert "the most is" in refused.stderr
    release(node, held.id)
    again = quota(node, 100)
    release(node, again.id)


def test_a_request_for_more_devices_than_the_node_has_is_refused(node: DemoNode) -> None:
    with pytest.raises(VgpuError) as refused:
        allocate(node, count=9)
    assert refused.value.code in (ErrorCode.IMPOSSIBLE, ErrorCode.NO_CAPACITY)
    assert "8" in refused.value.sentence + refused.value.hint


def test_an_unknown_device_is_refused(node: DemoNode) -> None:
    refused = node.ctl("alloc", "--device", "99", check=False)
    assert refused.returncode == 6
    assert "E302" in refused.stderr


def test_a_request_id_used_for_another_request_is_refused(node: DemoNode) -> None:
    first = quota(node, 1, request_id="twice")
    assert quota(node, 1, request_id="twice") == first
    refused = node.ctl(
        "alloc", "--memory", "2GiB", "--isolation", "quota", "--request-id", "twice", check=False
    )
    assert refused.returncode == 35
    assert "E303" in refused.stderr
    assert states(node) == {first.id: "active"}
    release(node, first.id)
    other = quota(node, 2, request_id="twice")
    assert other.id != first.id, "a released request is over, and its id free"
    release(node, other.id)


@pytest.mark.parametrize("verb", ["release", "show", "explain"])
def test_an_unknown_allocation_is_refused(node: DemoNode, verb: str) -> None:
    refused = node.ctl(verb, "0123456789ab", check=False)
    assert refused.returncode == 6
    assert "E301" in refused.stderr


def test_a_release_is_idempotent(node: DemoNode) -> None:
    held = quota(node)
    with client(node) as calls:
        assert not calls.release(held.id).already_released
        assert calls.release(held.id).already_released


def test_a_resize_to_an_invalid_size_changes_nothing(node: DemoNode) -> None:
    held = quota(node, 4)
    with client(node) as calls:
        for memory, share in ((0, None), (2**63, None), (None, 0.0), (None, math.nan), (None, 101.0)):
            with pytest.raises(VgpuError) as refused:
                calls.resize(held.id, memory, share)
            assert refused.value.code.number in (101, 102, 401, 402), refused.value
        assert calls.get_allocation(held.id).slices == held.slices
    release(node, held.id)
