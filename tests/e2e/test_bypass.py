"""Preload tenants that allocate device memory without libvgpu: vgpud finds and reports them, and ends them if
the policy says so.
"""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.conditions import needs
from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import PROBE, client, eventually, quota, states
from tests.native.harness import TEST_BUILD, static_program
from tests.simnode import ROOT
from vgpud import lease_layout as layout
from vgpud.node.tenants import bypasses as survey

POLICY = """version = 1
[[device]]
mode = "auto"
[device.preload]
on_bypass = "{rule}"
"""
QUOTA = ["--isolation", "quota", "--memory", "2GiB", "--device", "0"]
HOLD = [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]
SIMULATED = ("VGPU_SIM_STATE", "LD_LIBRARY_PATH")


def marks(node: DemoNode) -> dict[str, dict[str, str]]:
    """The sentences of the marks, by allocation and kind."""
    with client(node) as calls:
        held = calls.list_allocations().allocations
    return {item.id: {mark.kind: mark.sentence for mark in item.marks} for item in held}


def events(node: DemoNode, kind: str) -> list[str]:
    with client(node) as calls:
        return [event.subject for event in calls.list_events(1000).events if event.kind == kind]


class Line(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def metric(node: DemoNode, name: str, label: str = "") -> float:
    """The sum of a metric over all its labels, or over the rows with one label."""
    path = node.run_dir / "metrics.sock"
    eventually(path.exists, "it is opened after the others")
    line = Line(str(path))
    line.request("GET", "/metrics", headers={"Host": "localhost"})
    text = line.getresponse().read().decode()
    line.close()
    rows = [row for row in text.splitlines() if row.startswith((f"{name} ", f"{name}{{"))]
    assert rows or f"# TYPE {name}" in text, f"no metric {name}"
    return sum(float(row.rpartition(" ")[2]) for row in rows if label in row)


def start(node: DemoNode, command: Sequence[str], options: list[str] | None = None) -> tuple[Tenant, str]:
    """Starts a tenant and waits for its first line. Returns the tenant and its allocation."""
    before = states(node)
    tenant = node.tenant(options or QUOTA, list(command))
    tenant.line()
    (new,) = states(node).keys() - before.keys()
    return tenant, new


def stripped(node: DemoNode) -> list[str]:
    """The beginning of a command that drops the lease's environment, as a program that cleans its environment
    does. Only the simulator's variables stay.
    """
    return ["env", "-i", *(f"{name}={node.environment[name]}" for name in SIMULATED)]


def look_again(node: DemoNode) -> None:
    """Waits until vgpud has begun and ended a survey."""
    looks = metric(node, "vgpud_bypass_looks_total")
    eventually(lambda: metric(node, "vgpud_bypass_looks_total") >= looks + 2, "it is looked at again")


@pytest.fixture(scope="module")
def shared_policy() -> str:
    return POLICY.format(rule="report")


@pytest.fixture
def ended() -> Iterator[list[Tenant]]:
    """Tenants that are killed after the test."""
    left: list[Tenant] = []
    yield left
    for tenant in left:
        tenant.process.kill()
        tenant.process.communicate()


def bypasses(node: DemoNode) -> dict[str, list[str]]:
    return {
        "without the library": ["env", "-u", "LD_PRELOAD", *HOLD],
        "with an empty environment": [*stripped(node), *HOLD],
        "with a library that was removed": ["env", "LD_PRELOAD=/nonexistent/libvgpu.so", *HOLD],
        "in a child": ["sh", "-c", f"exec 3<&0; {' '.join(stripped(node))} {' '.join(HOLD)} <&3 & wait"],
        "by a static program": [str(static_program("bare-static")), "0", "1024"],
        "by the driver's ioctl alone": [str(TEST_BUILD / "bare"), "0", "1024"],
        "by RTLD_DEEPBIND": [str(TEST_BUILD / "deepbind"), str(TEST_BUILD / "libdeepbind_plugin.so"), "4096"],
    }


@pytest.mark.parametrize(
    "way",
    [
        "without the library",
        "with an empty environment",
        "with a library that was removed",
        "in a child",
        "by a static program",
        "by the driver's ioctl alone",
        "by RTLD_DEEPBIND",
    ],
)
def test_a_program_that_bypasses_libvgpu_is_marked(
    shared_node: DemoNode, way: str, ended: list[Tenant]
) -> None:
    node = shared_node
    counted = metric(node, "vgpud_allocations_marked_total")
    tenant, allocation = start(node, bypasses(node)[way])
    ended.append(tenant)
    eventually(lambda: "bypassed" in marks(node).get(allocation, {}), "it is marked")
    shown = node.ctl("show", allocation).stdout
    assert "MiB of device memory that libvgpu does not count" in shown or "GiB of device" in shown, shown
    assert "active (bypassed)" in node.ctl("ls").stdout
    assert events(node, "allocation_bypassed").count(allocation) == 1
    assert metric(node, "vgpud_allocations_marked_total") == counted + 1
    assert metric(node, "vgpud_allocation_bypassed_bytes") >= 500 << 20
    audited = [json.loads(line) for line in node.log.read_text().splitlines() if '"audit"' in line]
    told = [one for one in audited if one["audit"] == "mark" and one["allocation"] == allocation]
    assert [one["mark"] for one in told] == ["bypassed"]
    assert tenant.alive, "it is told, and not ended"


def test_a_bypass_is_marked_within_a_second_as_the_page_says() -> None:
    readings = (survey._READINGS - 1) * survey._READING_PAUSE_SECONDS
    assert survey._LOOK_SECONDS + readings < 1
    page = (ROOT / "docs" / "preload-limits.md").read_text()
    assert f"takes seven more readings within {readings:.2f} seconds" in page
    assert "within a\nsecond of the start of the excess" in page


def test_a_process_past_its_limits_is_listed_with_its_allocation(
    shared_node: DemoNode, ended: list[Tenant]
) -> None:
    node = shared_node
    tenant, allocation = start(node, bypasses(node)["in a child"])
    ended.append(tenant)
    with client(node) as calls:
        eventually(lambda: "bypassed" in marks(node).get(allocation, {}), "it is marked")
        (process,) = [one for one in calls.list_processes().processes if one.allocation_id == allocation]
    pid = str(process.pid)
    assert f"{allocation} (not counted by libvgpu)" in node.ctl("ps").stdout
    assert pid in node.ctl("show", allocation).stdout
    assert f"process {pid} (vgpu-probe) on device 0 is not counted by libvgpu" in node.ctl("why", pid).stdout
    assert "outside vgpud" not in node.ctl("doctor", check=False).stdout


def test_a_mark_of_a_bypass_outlives_a_kill_of_vgpud(make_node: NodeMaker, ended: list[Tenant]) -> None:
    node = make_node(policy=POLICY.format(rule="report"))
    node.start()
    tenant, allocation = start(node, ["env", "-u", "LD_PRELOAD", *HOLD])
    ended.append(tenant)
    eventually(lambda: "bypassed" in marks(node)[allocation], "it is marked")
    node.kill()
    node.start()
    assert "bypassed" in marks(node)[allocation]
    look_again(node)
    assert events(node, "allocation_bypassed") == [allocation], "it is told once"


def test_a_move_does_not_mark_a_tenant_that_holds_more_than_its_lowered_limit(
    shared_node: DemoNode, ended: list[Tenant]
) -> None:
    node = shared_node
    tenant, allocation = start(node, HOLD)
    ended.append(tenant)
    look_again(node)
    node.ctl("resize", allocation, "--memory", "100MiB")
    look_again(node)
    node.ctl("move", allocation, "--to", "1")
    look_again(node)
    assert "bypassed" not in marks(node)[allocation]


def test_the_policy_ends_only_the_tenant_that_bypasses_libvgpu(make_node: NodeMaker) -> None:
    """The user's other processes and its other allocation keep running."""
    node = make_node(policy=POLICY.format(rule="stop"))
    node.start()
    honest, first = start(node, HOLD)
    script = f"exec 3<&0; {' '.join(stripped(node))} {' '.join(HOLD)} <&3 & echo '{{}}'; wait"
    past = node.tenant(QUOTA, ["sh", "-c", script])
    past.line()
    eventually(lambda: set(states(node)) == {first}, "the one past libvgpu is released")
    past.process.communicate(timeout=300)
    assert honest.alive
    assert marks(node) == {first: {}}
    assert metric(node, "vgpud_allocations_stopped_total") == 1
    assert len(events(node, "allocation_stopped")) == 1
    assert honest.end()[0] == 0


def test_a_tenant_that_fills_its_usage_file_is_marked(shared_node: DemoNode, ended: list[Tenant]) -> None:
    node = shared_node
    fill = "import os; f = os.open(os.environ['VGPU_LEASE'] + '/usage', os.O_RDWR); os.ftruncate(f, 1 << 24)"
    tenant, allocation = start(node, ["sh", "-c", f'{sys.executable} -c "{fill}"; exec {" ".join(HOLD)}'])
    ended.append(tenant)
    eventually(lambda: "tampered" in marks(node)[allocation], "it is marked")
    assert events(node, "allocation_tampered") == [allocation]
    assert "active (tampered)" in node.ctl("ls").stdout


def test_driver_functions_unknown_to_libvgpu_are_reported_once_for_each_allocation(
    shared_node: DemoNode, ended: list[Tenant]
) -> None:
    """A tenant calls a driver function that libvgpu does not know. However often vgpud checks, the tenant's
    allocation gets one mark, and `doctor` prints one line for both allocations.
    """
    node = shared_node
    tenants = [start(node, HOLD) for _ in range(2)]
    ended += [tenant for tenant, _ in tenants]
    for _, allocation in tenants:
        usage = os.open(node.run_dir / "leases" / allocation / "usage", os.O_RDWR)
        os.pwrite(usage, struct.pack("<I", 3) + b"cuMemTeleport", layout.USAGE_UNKNOWN_CALLS)
        os.close(usage)
    eventually(lambda: all("unknown-calls" in marks(node)[name] for _, name in tenants), "both are told")
    look_again(node)
    assert sorted(events(node, "allocation_unknown_calls")) == sorted(name for _, name in tenants)
    assert "cuMemTeleport" in node.ctl("show", tenants[0][1]).stdout
    assert node.ctl("doctor", check=False).stdout.count("3 functions that libvgpu does not know") == 1
    assert metric(node, "vgpud_driver_unknown_calls") == 3
    assert "bypassed" not in node.ctl("ls").stdout, "it is no fault of the tenant's"


@needs("root", "namespaces")
def test_a_process_of_a_container_that_never_connected_is_marked(
    shared_node: DemoNode, ended: list[Tenant]
) -> None:
    """The tenant has its lease mounted at the path that containers have. Neither its environment nor a parent
    process names the allocation.
    """
    node = shared_node
    allocation = quota(node, 2)
    lease = node.run_dir / "leases" / allocation.id
    place = "mkdir -p /run/vgpu/lease && mount --bind"
    program = " ".join([*stripped(node), *HOLD])
    inside = f"mount -t tmpfs none /run && {place} {lease} /run/vgpu/lease && exec {program}"
    process = subprocess.Popen(
        ["unshare", "--mount", "setsid", "sh", "-c", inside],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tenant = Tenant(process)
    ended.append(tenant)
    tenant.line()
    eventually(lambda: "bypassed" in marks(node)[allocation.id], "it is marked")


def honest(node: DemoNode) -> dict[str, list[str]]:
    """One program for each way of allocating that libvgpu limits. Each program runs until its standard input
    is closed. The programs that use the most processor time start last.
    """
    families = ("alloc", "pitch", "managed", "async", "vmm", "array")
    cycles = str(TEST_BUILD / "context-cycles")
    again = "while kill -0 $PPID 2>/dev/null && ! read -t 0 _; do {} >/dev/null || exit 1; done"
    return {
        "fills": [PROBE, "fill", "--piece", "64MiB", "--keep", "--then-wait-on-stdin"],
        "launches": [PROBE, "run", "--seconds", "3600"],
        "graphs with memory nodes": [str(TEST_BUILD / "strangers"), "graphs"],
        "ranks that share a buffer, as NCCL's do": [str(TEST_BUILD / "strangers"), "ranks"],
        "starts and ends": ["bash", "-c", again.format(f"{PROBE} hold 300MiB --seconds 0")],
        **{
            f"contexts: {how}": ["bash", "-c", again.format(f"{cycles} {how} 6 1 50 1000")]
            for how in ("reset", "release", "destroy", "green", "live")
        },
        "two processes": [
            "sh",
            "-c",
            f"{PROBE} hold 200MiB --seconds 3600 >/dev/null 2>&1 & exec {PROBE} run --seconds 3600",
        ],
        **{
            f"churns {name}": [PROBE, "--family", name, "churn", "100000000", "--piece", "256MiB"]
            for name in families
        },
    }


def test_honest_programs_are_never_marked(make_node: NodeMaker) -> None:
    """An MPS tenant runs at the same time. All programs call the driver throughout, so each check of
    vgpud overlaps with their calls.
    """
    node = make_node("h200x8", policy=POLICY.format(rule="stop"))
    node.start()
    options = ["--isolation", "quota", "--memory", "4GiB", "--cores", "20"]
    tenants = {name: node.tenant(options, command) for name, command in honest(node).items()}
    mps = ["--isolation", "compute", "--memory", "4GiB", "--cores", "20"]
    tenants["mps"] = node.tenant(mps, [PROBE, "hold", "1GiB", "--then-wait-on-stdin"])
    try:
        eventually(lambda: len(states(node)) == len(tenants), "all of them run")
        look_again(node)
        assert [name for name, tenant in tenants.items() if not tenant.alive] == []
        # a slow machine can cause the mark `gated`, which proves no bypass
        gated = metric(node, "vgpud_allocations_marked_total", 'mark="gated"')
        assert {kind for found in marks(node).values() for kind in found} <= {"gated"}
        assert metric(node, "vgpud_allocations_marked_total") == gated
    finally:
        for tenant in tenants.values():
            tenant.process.kill()
        for tenant in tenants.values():
            tenant.process.communicate()
