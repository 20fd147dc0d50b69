"""A suspended lease: threads that launch or allocate wait in libvgpu before they reach the driver, and are
counted.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import pytest

from tests.lease.conftest import Node, eventually
from tests.native.harness import GIB, TEST_BUILD, UUIDS
from vgpud.lease import DeviceLimits, LeaseActivity, read_activity, read_limits, update_limits

# Makes one call for each line of input, and prints the driver's result when the call returns
PROGRAM = """
import ctypes as c, json, sys
u = c.CDLL(None)
context, memory = c.c_void_p(), c.c_uint64()
def say(**words):
    sys.stdout.write(json.dumps(words) + "\\n")
    sys.stdout.flush()
c.CDLL("libcuda.so.1", mode=c.RTLD_GLOBAL)
assert u.cuInit(0) == 0
assert u.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert u.cuCtxSetCurrent(context) == 0
assert u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(8 << 20)) == 0
one = (1, 1, 1, 1, 1, 1, 0, None, None, None)
n, mib = c.c_size_t, 1 << 20
class Extent(c.Structure):
    _fields_ = [(name, c.c_size_t) for name in ("width", "height", "depth")]
class Copy3D(c.Structure):
    _fields_ = [("source", c.c_uint64 * 5), ("to", c.c_uint64 * 5), ("extent", Extent), ("rest", c.c_uint64)]
class FabricCopy(c.Structure):
    _fields_ = [("source", c.c_uint64 * 3), ("to", c.c_uint64 * 3), ("bytes", n), ("rest", c.c_uint64)]
copy = Copy3D((1,), (1,), Extent(4 * mib, 4, 4))
fabric = (FabricCopy * 2)(*(FabricCopy((1,), (1,), 32 * mib),) * 2)
calls = {
    "copy with attributes": lambda: u.cuMemcpyWithAttributesAsync(memory, memory, n(64 * mib), None, None),
    "copy in 3D with attributes": lambda: u.cuMemcpy3DWithAttributesAsync(c.byref(copy), n(0), None),
    "batch in 3D": lambda: u.cuMemcpy3DBatchAsync_v2(n(1), c.byref(copy), n(0), None),
    "batch on the fabric": lambda: u.cuFabricCpyBatchAsync(n(2), fabric, n(0), None),
    "launch": lambda: u.cuLaunchKernel(c.c_void_p(1), *one),
    "synchronise": lambda: u.cuCtxSynchronize(),
    "allocate": lambda: u.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(4096)),
    "free": lambda: u.cuMemFree_v2(memory),
}
say(ready=True)
for line in sys.stdin:
    calls[line.strip()]()
    say(done=line.strip())
"""
# calls that the fake driver has; tests/e2e/test_idle.py tests more
CALLS = ("launch", "synchronise", "allocate", "free")


def ask(process: "Popen[str]", call: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{call}\n")
    process.stdin.flush()


def answer(process: "Popen[str]") -> dict[str, object]:
    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found


def put(node: Node, lease: Path, away: bool, look: bool = True) -> None:
    update_limits(lease, [DeviceLimits(UUIDS[0], GIB)], away=away)
    if look:
        node.client.look(lease.name)


def looked(node: Node, lease: Path) -> LeaseActivity:
    before = read_activity(lease).answers
    node.client.look(lease.name)
    eventually(
        lambda: all(a > b for (_, a), (_, b) in zip(read_activity(lease).answers, before, strict=True))
    )
    return read_activity(lease)


@pytest.fixture
def lease(node: Node) -> Path:
    return node.lease()


@pytest.fixture
def tenant(node: Node, lease: Path) -> "Popen[str]":
    process = node.tenant(lease, sys.executable, "-c", PROGRAM)
    assert answer(process) == {"ready": True}
    return process


def test_every_kind_of_call_of_a_suspended_process_waits_and_is_counted(
    node: Node, lease: Path, tenant: "Popen[str]"
) -> None:
    for call in CALLS:
        put(node, lease, away=True)
        eventually(lambda: read_activity(lease).quiet)
        assert read_activity(lease).wants == 0
        ask(tenant, call)
        eventually(lambda: read_activity(lease).wants == 1)
        put(node, lease, away=False)
        assert answer(tenant) == {"done": call}
        eventually(lambda: read_activity(lease).wants == 0)


def test_every_wrapped_driver_call_of_a_suspended_process_waits(node: Node, lease: Path) -> None:
    process = node.tenant(lease, TEST_BUILD / "every-call")
    assert process.stdout is not None
    count = int(process.stdout.readline())
    assert count > 400
    put(node, lease, away=True)
    eventually(lambda: read_activity(lease).quiet)
    ask(process, "")
    # a timeout is not raised here: the assertion below fails with the names of the calls that did not wait
    with suppress(AssertionError):
        eventually(lambda: read_activity(lease).wants == count)
    ask(process, "")
    assert (process.stdout.readline().split(), read_activity(lease).wants) == ([], count)


def test_every_kind_of_driver_call_counts_as_activity(node: Node, lease: Path, tenant: "Popen[str]") -> None:
    for call in CALLS:
        before = looked(node, lease)
        again = looked(node, lease)
        assert (again.calls, again.wants) == (before.calls, 0), "time alone is no work"
        ask(tenant, call)
        answer(tenant)
        assert looked(node, lease).calls > before.calls, call
    eventually(lambda: not looked(node, lease).busy)


@pytest.mark.parametrize(
    "call", ["copy with attributes", "copy in 3D with attributes", "batch in 3D", "batch on the fabric"]
)
def test_a_copy_counts_as_one_launch_for_each_mebibyte(
    node: Node, lease: Path, tenant: "Popen[str]", call: str
) -> None:
    before = looked(node, lease)
    ask(tenant, call)
    answer(tenant)
    assert looked(node, lease).calls - before.calls == 64


def test_a_suspended_process_resumes_without_a_message(node: Node, lease: Path, tenant: "Popen[str]") -> None:
    put(node, lease, away=True)
    eventually(lambda: read_activity(lease).quiet)
    node.kill_arbiter()
    ask(tenant, "launch")
    eventually(lambda: read_activity(lease).wants == 1)
    put(node, lease, away=False, look=False)
    assert answer(tenant) == {"done": "launch"}


def test_a_process_is_suspended_even_if_the_arbiter_was_absent_when_the_order_came(
    node: Node, lease: Path, tenant: "Popen[str]"
) -> None:
    """The lease is suspended while the arbiter is absent. The process reads the limits page when it registers
    again.
    """
    node.kill_arbiter()
    put(node, lease, away=True, look=False)
    node.start_arbiter()
    eventually(lambda: read_activity(lease).quiet)
    ask(tenant, "synchronise")
    eventually(lambda: read_activity(lease).wants == 1)
    put(node, lease, away=False)
    assert answer(tenant) == {"done": "synchronise"}


def test_a_process_started_during_a_suspension_waits_too(node: Node, lease: Path) -> None:
    put(node, lease, away=True)
    process = node.tenant(lease, sys.executable, "-c", PROGRAM)
    eventually(lambda: read_activity(lease).wants == 1)
    assert read_limits(lease).away
    put(node, lease, away=False)
    assert answer(process) == {"ready": True}


def test_a_killed_process_does_not_count_as_waiting_for_the_resume(
    node: Node, lease: Path, tenant: "Popen[str]"
) -> None:
    put(node, lease, away=True)
    ask(tenant, "launch")
    eventually(lambda: read_activity(lease).wants == 1)
    tenant.kill()
    eventually(lambda: read_activity(lease) == LeaseActivity())
