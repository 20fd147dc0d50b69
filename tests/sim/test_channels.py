"""The control device of a simulated node: the channels that libcuda makes on it, and the call that disables
them.
"""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.native.harness import TEST_BUILD
from tests.sim.tenant import Tenant
from tests.simnode import ROOT, SimNode

Make = Callable[..., SimNode]
CONTEXT_BYTES = 526 << 20
REFUSED, BAD_CHANNEL, BAD_CLIENT, NO_GROUP = 0x1F, 0x21, 0x23, 0x57
LONG = "launch 1 300000"
LONG_NS = 300e6


class Outside:
    """A process that duplicates another process's control file for each call, as the arbiter does."""

    CODE = """
import ctypes as c, json, os, sys
libc = c.CDLL(None, use_errno=True)
request = lambda nr, size: 3 << 30 | size << 16 | ord("F") << 8 | nr
class Control(c.Structure):
    _fields_ = [(n, c.c_uint32) for n in ("client", "object", "command", "flags")] + [("parameters", c.c_uint64), ("size", c.c_uint32), ("status", c.c_uint32)]
def control(fd, client, object, command, parameters):
    a = Control(client, object, command, 0, c.addressof(parameters), c.sizeof(parameters), 0xffff)
    rc = libc.ioctl(fd, c.c_ulong(request(0x2a, c.sizeof(a))), c.byref(a))
    return a.status if rc == 0 else -c.get_errno()
class Disable(c.Structure):
    _fields_ = [("disable", c.c_uint8), ("count", c.c_uint32), ("only", c.c_uint8), ("rewind", c.c_uint8), ("event", c.c_uint64), ("clients", c.c_uint32 * 64), ("channels", c.c_uint32 * 64)]
class Gid(c.Structure):
    _fields_ = [("index", c.c_uint32), ("flags", c.c_uint32), ("length", c.c_uint32), ("data", c.c_char * 256)]
kept = []
def file_of(pid):
    path = os.environ["VGPU_SIM_STATE"]
    own = [int(n) for n in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{n}") == path]
    pidfd = os.pidfd_open(pid)
    fd = libc.syscall(438, pidfd, own[0], 0)
    os.close(pidfd)
    return fd
for line in sys.stdin:
    a = json.loads(line)
    fd = os.open(os.environ["VGPU_SIM_STATE"], os.O_RDWR) if a["pid"] is None else kept[-1] if a["pid"] == 0 else file_of(a["pid"])
    if a["verb"] == "keep":
        kept.append(fd)
        answer = "kept"
    elif a["verb"] == "gid":
        gid = Gid()
        answer = control(fd, a["client"], a["subdevice"], 0x2080014a, gid) or gid.data.decode()
    elif a["verb"] == "schedule":
        answer = control(fd, a["client"], a["group"], 0xa06c0101, (c.c_uint8 * 3)(a["enable"]))
    else:
        p = Disable(disable=a["verb"] == "off", count=len(a["channels"]))
        for i, (client, channel) in enumerate(a["channels"]):
            p.clients[i], p.channels[i] = client, channel
        answer = control(fd, a["client"], a["subdevice"], 0x2080110b, p)
    if a["verb"] != "keep" and a["pid"] != 0:
        os.close(fd)
    print(json.dumps(answer), flush=True)
"""

    def __init__(self, node: SimNode) -> None:
        library = str(node.build / "sim" / "lib" / "libvgpu-sim-rm.so")
        self.process = node.start([sys.executable, "-c", self.CODE], {"LD_PRELOAD": library})

    def ask(self, verb: str, pid: int | None, **rest: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"verb": verb, "pid": pid, **rest}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def turn(self, verb: str, node: SimNode, pid: int, **change: Any) -> Any:
        """Turns all compute channels of a process `off` or `on`. Returns the status."""
        process, use = entry(node, pid)
        client = process["client"]
        call = {
            "client": client,
            "subdevice": use["subdevice"],
            "channels": [[client, channel] for channel in use["compute_channels"]],
        }
        return self.ask(verb, change.pop("file", pid), **{**call, **change})


def entry(node: SimNode, pid: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entry of a process in the dump of the node's state, and the process's use of its first device."""
    process = next(p for p in node.dump()["processes"] if p["pid"] == pid)
    return process, process["uses"][0]


def done_ns(node: SimNode, pid: int) -> float:
    return float(entry(node, pid)[1]["done_ns"])


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node()


@pytest.fixture
def tenant(node: SimNode) -> Tenant:
    return Tenant(node)


@pytest.fixture
def outside(node: SimNode) -> Outside:
    return Outside(node)


GROUP = "a06c " + "c86f cbc0 " * 8 + "schedule " + ("a06c " + "c86f " * 4 + "schedule ") * 3


def test_a_preloaded_ioctl_function_sees_each_driver_object_that_is_made_and_freed(node: SimNode) -> None:
    library = TEST_BUILD / "librecorder.so"
    code = "from tests.sim.cuda import *; d = Driver(); d.init(); d.context(); x = d.context(); d('cuCtxDestroy_v2', x)"
    done = node.run([sys.executable, "-c", code], {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)})
    assert done.stderr == "41 80 2080 " + GROUP * 2 + "free " * 4


def test_channels_end_with_their_context_and_forty_contexts_have_forty_channel_groups(
    node: SimNode, tenant: Tenant
) -> None:
    pid = tenant.process.pid
    tenant.do("contexts = [cu.context() for _ in range(39)]")
    assert entry(node, pid)[1]["channels"] == 40 * 8
    tenant.do("[cu('cuCtxDestroy_v2', x) for x in contexts]")
    assert entry(node, pid)[1]["channels"] == 8


def test_a_kernel_preempted_by_disabling_its_channels_resumes_without_loss(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    pid = tenant.process.pid
    # on a busy machine the kernel may end before the channels are disabled, and the test tries again
    for launched in range(1, 100):
        tenant.say(LONG)
        assert outside.turn("off", node, pid) == 0
        stands = done_ns(node, pid)
        if stands < launched * LONG_NS:
            break
        assert outside.turn("on", node, pid) == 0
    assert (launched - 1) * LONG_NS < stands < launched * LONG_NS
    assert done_ns(node, pid) == stands
    assert outside.turn("on", node, pid) == 0
    assert tenant.say("sync") == "ok"
    assert done_ns(node, pid) == launched * LONG_NS


def test_channels_disabled_twice_work_only_after_they_are_enabled_twice(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    """A call that enables already enabled channels changes nothing: afterwards one call disables them."""
    pid = tenant.process.pid
    off = []
    for verb in ("off", "off", "on", "on", "on", "off"):
        assert outside.turn(verb, node, pid) == 0
        off.append(entry(node, pid)[1]["channels_off"])
    assert off == [8, 8, 8, 0, 0, 8]
    assert outside.turn("on", node, pid) == 0
    tenant.say("launch 1 10")
    assert tenant.say("sync") == "ok"


def test_scheduling_a_channel_group_enables_its_channels_however_often_they_were_disabled(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    pid = tenant.process.pid
    assert [outside.turn("off", node, pid) for _ in range(2)] == [0, 0]
    group = entry(node, pid)[1]["compute_channels"][0] - 1
    assert outside.turn("schedule", node, pid, group=group, enable=1) == 0
    assert entry(node, pid)[1]["channels_off"] == 0
    assert outside.turn("schedule", node, pid, group=group + 1, enable=1) == NO_GROUP


def test_the_channels_of_a_group_that_is_no_longer_scheduled_stand_until_it_is_scheduled_again(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    pid = tenant.process.pid
    group = entry(node, pid)[1]["compute_channels"][0] - 1
    off = []
    for call in ({"verb": "schedule", "enable": 0}, {"verb": "on"}, {"verb": "schedule", "enable": 1}):
        assert outside.turn(node=node, pid=pid, group=group, **call) == 0
        off.append(entry(node, pid)[1]["channels_off"])
    assert off == [8, 8, 0]


def test_an_order_to_disable_channels_may_name_those_of_another_client(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    """On an H200, too, an order may name channels of another client. The arbiter therefore names only
    channels of the client whose file it has.
    """
    other, use = entry(node, Tenant(node).process.pid)
    theirs = [[other["client"], channel] for channel in use["compute_channels"]]
    assert outside.turn("off", node, tenant.process.pid, channels=theirs) == 0
    assert entry(node, other["pid"])[1]["channels_off"] == 8


def test_work_submitted_to_disabled_channels_waits(node: SimNode, tenant: Tenant, outside: Outside) -> None:
    pid = tenant.process.pid
    outside.turn("off", node, pid)
    tenant.say("launch 3 10")
    assert done_ns(node, pid) == 0
    outside.turn("on", node, pid)
    assert tenant.say("sync") == "ok"


def test_channels_of_a_stopped_process_can_be_disabled_and_enabled(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    pid = tenant.process.pid
    tenant.say(LONG)
    os.kill(pid, signal.SIGSTOP)
    assert outside.turn("off", node, pid) == 0
    assert entry(node, pid)[1]["channels_off"] == 8
    assert outside.turn("on", node, pid) == 0
    os.kill(pid, signal.SIGCONT)
    assert tenant.say("sync") == "ok"


def test_copies_run_while_compute_channels_are_disabled(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    pid = tenant.process.pid
    tenant.say("alloc 1")
    tenant.do("s = c.c_void_p(); cu('cuStreamCreate', c.byref(s), 1)")
    tenant.do("k = c.c_void_p(); cu('cuStreamCreate', c.byref(k), 1)")
    tenant.do("cu('cuLaunchKernel', function, 1, 1, 1, 32, 1, 1, 0, k, None, None)")
    outside.turn("off", node, pid)
    tenant.do("cu('cuMemsetD32Async', c.c_uint64(pointers[0]), 7, c.c_size_t(1), s)")
    answer = "b = c.c_int(); cu('cuMemcpyDtoHAsync_v2', c.byref(b), c.c_uint64(pointers[0]), c.c_size_t(4), s); cu('cuStreamSynchronize', s); out = b.value"
    assert tenant.do(answer) == "7"


@pytest.mark.parametrize("channels", [[[0, 1]], [[0, 0x5C000001]], [[0, 0xFFFFFFFF]]])
def test_an_order_with_a_handle_that_is_not_a_channel_disables_nothing(
    node: SimNode, tenant: Tenant, outside: Outside, channels: list[list[int]]
) -> None:
    process, use = entry(node, tenant.process.pid)
    real = [process["client"], use["compute_channels"][0]]
    wrong = [[process["client"], channel] for _, channel in channels]
    assert outside.turn("off", node, tenant.process.pid, channels=[real, *wrong]) == BAD_CHANNEL
    assert entry(node, tenant.process.pid)[1]["channels_off"] == 0


def test_a_driver_client_is_identified_only_by_its_open_control_file(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    other = Tenant(node)
    assert outside.turn("off", node, tenant.process.pid, file=other.process.pid) == BAD_CLIENT
    assert outside.turn("off", node, tenant.process.pid, file=None) == BAD_CLIENT
    assert entry(node, tenant.process.pid)[1]["channels_off"] == 0


def test_a_call_that_names_too_many_channels_is_refused(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    process, use = entry(node, tenant.process.pid)
    sixty_four = [[process["client"], channel] for channel in use["compute_channels"]] * 8
    assert outside.turn("off", node, tenant.process.pid, channels=sixty_four) == 0


def test_a_subdevice_reports_the_uuid_of_its_device(node: SimNode, outside: Outside) -> None:
    tenant = Tenant(node, {"CUDA_VISIBLE_DEVICES": "3"})
    process, use = entry(node, tenant.process.pid)
    uuid = outside.ask("gid", tenant.process.pid, client=process["client"], subdevice=use["subdevice"])
    assert uuid == node.dump()["devices"][3]["uuid"]


def test_a_process_killed_with_disabled_channels_leaves_no_channels(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    tenant.say(LONG)
    outside.turn("off", node, tenant.process.pid)
    tenant.kill()
    assert node.dump()["processes"] == []
    other = Tenant(node)
    other.say("launch 1 10")
    assert other.say("sync") == "ok"


def test_a_copied_descriptor_of_the_control_device_keeps_the_memory_of_a_dead_process(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    outside.ask("keep", tenant.process.pid)
    tenant.kill()
    assert node.dump()["devices"][0]["memory_used"] == CONTEXT_BYTES
    outside.process.kill()
    outside.process.wait()
    assert node.dump()["devices"][0]["memory_used"] == 0


def test_a_simulated_driver_set_to_refuse_returns_its_status_and_disables_no_channel(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    node.sim("fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", str(REFUSED))
    assert outside.turn("off", node, tenant.process.pid) == REFUSED
    assert entry(node, tenant.process.pid)[1]["channels_off"] == 0


def test_a_simulated_driver_set_to_lie_returns_success_and_disables_no_channel(
    node: SimNode, tenant: Tenant, outside: Outside
) -> None:
    node.sim("fault", "fail", "--function", "FIFO_DISABLE_CHANNELS.lies", "--code", "1")
    assert outside.turn("off", node, tenant.process.pid) == 0
    assert entry(node, tenant.process.pid)[1]["channels_off"] == 0
