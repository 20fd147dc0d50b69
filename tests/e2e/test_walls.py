"""Memory limits that the driver enforces for the control group of a tenant ("memory walls"): driver branch
615, simulated.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import simnode
from tests.cgroups import cgroup  # noqa: F401
from tests.conditions import needs
from tests.demo.node import BUILD, POLICY, DemoNode
from tests.e2e.conftest import ROOMY, PreparedNode, end_daemon, end_helpers
from tests.e2e.support import (
    MIB,
    PROBE,
    client,
    eventually,
    is_killed_at_its_starts,
    simulate,
    states,
    was_killed,
)
from tests.e2e.test_evict import EVICTS, suspend
from tests.e2e.test_memory import Talker
from tests.e2e.test_move import move
from tests.e2e.test_suspend import resume
from tests.e2e.test_turns import CONTEXT_MIB, all_but, answer, close, is_killed_in_a_turn, tenant
from tests.e2e.test_turns import HOLD as HOLDS
from tests.e2e.test_turns import ROOMY as TURNS
from tests.kubelet.cluster import Cluster, HttpCluster
from tests.kubelet.double import fixed_plugins, kubelet
from tests.kubelet.storm import POLICY as MEMORY_UNITS
from tests.kubelet.storm import UNITS
from tests.kubelet.test_dra_daemon import ask, cluster, join, published  # noqa: F401
from tests.native.harness import TEST_BUILD, static_program

SIMULATED = ("VGPU_SIM_STATE", "LD_LIBRARY_PATH")
QUOTA = ["--isolation", "quota", "--memory", "2GiB", "--device", "0"]
HOLD = [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]
#: Allocates in steps of 64 MiB on a device until the driver refuses, and prints the sum in MiB.
GREEDY = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1", mode=int(sys.argv[2]))
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1]))
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
got = 0
while got < 8192 and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0:
    got += 64
print(json.dumps({"mib": got}), flush=True)
sys.stdin.read()
"""
RTLD_NOW, RTLD_DEEPBIND = 2, 8
DRA_POLICY = """version = 1
[[device]]
mode = "preload"
[dra]
enabled = true
check_seconds = 1
"""
POD_NAMES = {"sandbox-namespace": "ml", "sandbox-name": "train-0", "container-name": "main"}


@pytest.fixture
def walled(tmp_path: Path, cgroup: Path) -> Iterator[DemoNode]:  # noqa: F811
    """A daemon on driver branch 615, whose tenants have control groups below `cgroup`. It is not started."""
    yield from node_of(tmp_path, cgroup, "615")


@pytest.fixture
def crowded(tmp_path: Path, cgroup: Path) -> Iterator[DemoNode]:  # noqa: F811
    """As `walled`, with an overcommitted device on which the tenants take turns."""
    yield from node_of(tmp_path, cgroup, "615", TURNS)


@contextmanager
def containers_of(node: DemoNode, top: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """A pod with 2 GiB of a device, and two containers of it with a control group each. Yields the allocation
    and the containers' init processes by group.
    """
    inits: dict[str, subprocess.Popen[bytes]] = {}

    async def admit() -> str:
        async with kubelet(node.folder / "k") as k:
            node.start()
            await k.healthy(UNITS, 8 * 139)
            answer = await k.admit("ns/pod", UNITS, 2)
            return str(answer.cdi_devices[0].name.partition("=")[2])

    name = asyncio.run(admit())
    try:
        for one in ("init", "main"):
            (top / one).mkdir()
            inits[one] = subprocess.Popen(["sleep", "infinity"])
            (top / one / "cgroup.procs").write_text(str(inits[one].pid))
            hook(node, json.dumps({"id": one, "pid": inits[one].pid, "bundle": "/b"}), "bind", name)
        yield name, inits
    finally:
        for init in inits.values():
            init.kill()
            init.wait()


def node_of(folder: Path, group: Path, branch: str, policy: str = POLICY) -> Iterator[DemoNode]:
    inside = simnode.create(folder / "sim", "h200x8", driver=branch).environment(os.environ)
    node = PreparedNode(policy, inside)
    node.environment["VGPUD_CGROUP"] = group.name
    try:
        yield node
    finally:
        end_daemon(node)
        end_helpers(node)
        node.remove()


def stripped(node: DemoNode) -> list[str]:
    return ["env", "-i", *(f"{name}={node.environment[name]}" for name in SIMULATED)]


def walls(node: DemoNode) -> dict[str, dict[int, int]]:
    """The hard limits in MiB, by control group (the name of its folder) and device."""
    found: dict[str, dict[int, int]] = {}
    for wall in json.loads(simnode.simulate(node.environment["VGPU_SIM_STATE"], "state", "--json"))["walls"]:
        found.setdefault(Path(wall["path"]).name, {})[wall["device"]] = wall["hard"] // MIB
    return found


def limit_by(node: DemoNode) -> list[str]:
    with client(node) as calls:
        return [item.memory_limit for item in calls.list_allocations().allocations]


def only(node: DemoNode) -> str:
    (name,) = states(node)
    return name


def past_libvgpu(node: DemoNode) -> dict[str, list[str]]:
    """Programs that allocate without libvgpu, and want 8 GiB of device 0."""
    python = [sys.executable, "-c", GREEDY, "0"]
    return {
        "env -i": [*stripped(node), *python, str(RTLD_NOW)],
        "unset": ["env", "-u", "LD_PRELOAD", *python, str(RTLD_NOW)],
        "deepbind": [*python, str(RTLD_NOW | RTLD_DEEPBIND)],
        "static": [str(static_program("bare-static")), "0", "8192"],
        "raw ioctl": [str(TEST_BUILD / "bare"), "0", "8192"],
    }


@needs("cgroups")
def test_programs_that_bypass_libvgpu_stay_within_their_limit_and_get_no_memory_of_other_devices(
    walled: DemoNode,
) -> None:
    walled.start()
    for way, program in past_libvgpu(walled).items():
        tenant = walled.tenant(QUOTA, program)
        assert tenant.line()["mib"] == 1472, way  # 2 GiB minus a context of 526 MiB, in steps of 64 MiB
        assert limit_by(walled) == ["driver"], way
        tenant.end()
        eventually(lambda: not states(walled), "the tenant has ended")
    program = [*stripped(walled), sys.executable, "-c", GREEDY, "1", str(RTLD_NOW)]
    tenant = walled.tenant(QUOTA, program)
    assert tenant.line()["mib"] == 0
    tenant.end()


@needs("cgroups")
@pytest.mark.parametrize("static_partitions", ["false", "true"])
def test_an_mps_tenant_is_behind_a_memory_wall(walled: DemoNode, static_partitions: str) -> None:
    """A program that does not load the MPS guard runs outside of MPS. The memory wall still holds it to its
    slice. The wall outlives a restart of vgpud, and ends with the tenant.
    """
    Path(walled.environment["VGPUD_CONFIG"]).write_text(
        f"{POLICY}[device.mps]\nstatic_partitions = {static_partitions}\n"
    )
    walled.start()
    share = ["--isolation", "compute", "--memory", "2GiB", "--cores", "25", "--device", "0"]
    tenant = walled.tenant(share, past_libvgpu(walled)["env -i"])
    assert tenant.line()["mib"] == 1472  # 2 GiB minus a context of 526 MiB, in steps of 64 MiB
    before = walls(walled)
    assert before == {only(walled): {**dict.fromkeys(range(8), 0), 0: 2048}}
    with client(walled) as calls:
        (held,) = calls.list_allocations().allocations
    has_partition = (Path(held.edits.host_env["VGPU_MPS_TENANT"]) / "partition").exists()
    assert has_partition == (static_partitions == "true")
    walled.kill()
    walled.start()
    assert limit_by(walled) == ["driver"] and walls(walled) == before
    tenant.end()
    eventually(lambda: not states(walled), "the tenant has ended")
    assert walls(walled) == {}


@needs("cgroups")
@pytest.mark.parametrize(("branch", "rule"), [("595", "driver"), ("615", "libvgpu")])
def test_libvgpu_limits_the_memory_if_the_driver_has_no_memory_walls_or_the_policy_sets_none(
    tmp_path: Path,
    cgroup: Path,  # noqa: F811
    branch: str,
    rule: str,
) -> None:
    policy = f'{POLICY}[device.preload]\nmemory_limit = "{rule}"\n'
    for node in node_of(tmp_path, cgroup, branch, policy):
        node.start()
        tenant = node.tenant(QUOTA, HOLD)
        tenant.line()
        assert limit_by(node) == ["libvgpu"]
        assert "by libvgpu" in node.ctl("show", only(node)).stdout
        assert walls(node) == {}
        tenant.end()


@needs("cgroups")
def test_show_and_why_say_that_the_driver_limits_the_memory(walled: DemoNode) -> None:
    walled.start()
    tenant = walled.tenant(QUOTA, HOLD)
    tenant.line()
    for verb in ("show", "why"):
        assert any("memory limit" in row and "by the driver" in row for row in said(walled, verb))
    tenant.end()
    simulate(walled, "fault", "fail", "--function", "nvmlDeviceSetMemoryLimits_v1")
    eventually(lambda: not states(walled), "the first tenant is gone")
    tenant = walled.tenant(QUOTA, HOLD)
    tenant.line()
    assert any("no-wall" in row and "libvgpu alone" in row for row in said(walled, "show"))
    doctor = " ".join(walled.ctl("doctor", check=False).stdout.split())
    assert f"memory walls {only(walled)}: " in doctor
    tenant.end()


def said(node: DemoNode, verb: str) -> list[str]:
    return node.ctl(verb, only(node), check=False).stdout.splitlines()


@needs("cgroups")
def test_the_memory_wall_follows_resize_suspension_and_move_and_ends_with_the_tenant(
    walled: DemoNode,
) -> None:
    walled.start()
    tenant = walled.tenant(QUOTA, HOLD)
    tenant.line()
    name = only(walled)
    closed = dict.fromkeys(range(8), 0)
    assert walls(walled) == {name: {**closed, 0: 2048}}
    walled.ctl("resize", name, "--memory", "3GiB")
    assert walls(walled) == {name: {**closed, 0: 3072}}
    suspend(walled, name)
    resume(walled, name)
    assert walls(walled) == {name: {**closed, 0: 3072}}
    move(walled, name, 5)
    assert walls(walled) == {name: {**closed, 5: 3072}}
    assert tenant.end()[0] == 0
    eventually(lambda: not states(walled), "the tenant has ended")
    assert walls(walled) == {}


@needs("cgroups")
def test_overcommitted_tenants_that_take_turns_keep_their_memory_walls(crowded: DemoNode) -> None:
    """A tenant has the same hard limit in its turn and between its turns, because its contexts and those of
    new programs stay on the device. So the hard limits of two tenants together exceed the device.
    """
    crowded.start()
    limit_mib = all_but(crowded, CONTEXT_MIB)
    closed = dict.fromkeys(range(8), 0)
    first, one = tenant(crowded, HOLDS, "8")
    first.line()
    second, two = tenant(crowded, HOLDS, "8")
    second.line()
    expected = {one: {**closed, 0: limit_mib}, two: {**closed, 0: limit_mib}}
    for _ in range(2):
        for program in (first, second):
            assert answer(program)["whole"]
            assert walls(crowded) == expected
    suspend(crowded, one)
    assert walls(crowded) == expected
    move(crowded, one, 5)
    resume(crowded, one)
    expected[one] = {**closed, 5: limit_mib}
    assert walls(crowded) == expected
    crowded.ctl("resize", one, "--memory", f"{limit_mib - 1024}MiB")
    expected[one][5] = limit_mib - 1024
    assert walls(crowded) == expected
    assert answer(first)["whole"]
    close(first, second)
    eventually(lambda: not states(crowded), "both have ended")
    assert walls(crowded) == {}


@needs("cgroups")
def test_a_crash_during_a_swap_leaves_each_tenant_its_memory_wall(crowded: DemoNode) -> None:
    crowded.start()
    first, one = tenant(crowded, HOLDS, "8")
    first.line()
    second, two = tenant(crowded, HOLDS, "8")
    second.line()
    expected = walls(crowded)
    assert expected.keys() == {one, two}
    crowded.stop()
    for point in ("swap-out.limit", "swap-in.limit"):
        is_killed_in_a_turn(crowded, point, first, second)
        assert walls(crowded) == expected, point
    crowded.start()
    for program in (first, second):
        assert [program.line()["whole"] for _ in range(2)] == [True, True]
    assert walls(crowded) == expected
    close(first, second)
    eventually(lambda: not states(crowded), "both have ended")
    assert walls(crowded) == {}


@needs("cgroups")
@pytest.mark.parametrize(
    ("policy", "deep"),
    [(EVICTS, False), (EVICTS, True), (ROOMY, False)],
    ids=["evicted", "evicted and saved", "saved"],
)
def test_a_suspended_or_moved_tenant_above_its_limit_gets_all_its_memory_back_despite_its_wall(
    tmp_path: Path,
    cgroup: Path,  # noqa: F811
    policy: str,
    deep: bool,
) -> None:
    """A resize below the tenant's use leaves its memory in place. All of it comes back after a suspension or
    a move, and then the limit holds again.
    """
    for node in node_of(tmp_path, cgroup, "615", policy):
        node.start()
        one = Talker(node, "640MiB")
        assert one.ask("100")[0] == 0
        node.ctl("resize", one.allocation, "--memory", "600MiB")
        assert walls(node)[one.allocation][0] == 600
        suspend(node, one.allocation, deep)
        assert walls(node)[one.allocation][0] == 526 + 100  # with the context
        resume(node, one.allocation)
        assert walls(node)[one.allocation][0] == 600
        move(node, one.allocation, 5)
        assert walls(node) == {one.allocation: {**dict.fromkeys(range(8), 0), 5: 600}}
        assert one.ask("1")[0] == 2
        one.end()


@needs("cgroups")
@pytest.mark.parametrize("point", ["allocate.attach-0", "release.record-intent"])
def test_a_crash_leaves_no_memory_wall_behind(walled: DemoNode, cgroup: Path, point: str) -> None:  # noqa: F811
    """vgpud crashes at each point and starts again, and the tenant ends. Then no memory wall is left."""
    walled.start(fault_point=point)
    tenant = walled.tenant(QUOTA, [PROBE, "hold", "64MiB"])
    tenant.process.wait(timeout=300)
    assert walled.daemon is not None
    walled.daemon.wait(timeout=300)
    walled.start()
    eventually(lambda: not states(walled), "the tenant has ended")
    eventually(lambda: not walls(walled), "its wall goes with it")
    assert [entry.name for entry in cgroup.iterdir() if entry.is_dir()] == []


@needs("cgroups")
def test_a_crash_in_a_move_leaves_the_memory_wall_on_the_tenants_device(walled: DemoNode) -> None:
    walled.start(fault_point="move.record-intent")
    tenant = walled.tenant(QUOTA, HOLD)
    tenant.line()
    name = only(walled)
    closed = dict.fromkeys(range(8), 0)
    walled.ctl("move", name, "--to", "5", check=False)
    was_killed(walled)
    walled.start(fault_point="move.record-move")
    assert limit_by(walled) == ["driver"] and walls(walled) == {name: {**closed, 0: 2048}}
    walled.ctl("move", name, "--to", "5", check=False)
    was_killed(walled)
    is_killed_at_its_starts(walled, "move.commit")
    walled.start()
    assert limit_by(walled) == ["driver"] and walls(walled) == {name: {**closed, 5: 2048}}
    tenant.end()


@needs("cgroups")
def test_processes_that_outlive_a_forced_release_get_no_more_memory(walled: DemoNode) -> None:
    walled.start()
    tenant = walled.tenant(QUOTA, HOLD)
    tenant.line()
    name = only(walled)
    walled.ctl("release", name, "--force")
    assert set(walls(walled)[name].values()) == {0}
    tenant.end()
    later = walled.tenant(QUOTA, HOLD)
    later.line()
    # the control group that the first tenant left no longer has a memory wall
    assert walls(walled).keys() == {only(walled)}
    later.end()


def hook(node: DemoNode, text: str, *words: str) -> str:
    """`vgpu-hook WORDS`, as a container engine starts it."""
    argv = [str(BUILD / "bin" / "vgpu-hook"), f"--run-dir={node.run_dir}", *words]
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=True, timeout=300).stdout


@needs("cgroups", "root")
def test_a_containers_cgroup_has_the_memory_limit_from_its_start_on(walled: DemoNode, cgroup: Path) -> None:  # noqa: F811
    """As with the hooks of a container engine, vgpud edits the container's config, and learns the container's
    init before the init runs the program.
    """
    walled.start()
    config = {
        "annotations": {"vgpud.io/memory": "2GiB", "vgpud.io/isolation": "quota", "vgpud.io/device": "0"}
    }
    hook(walled, json.dumps(config | {"process": {"env": [], "user": {"uid": 0, "gid": 0}}}), "precreate")
    name = only(walled)
    group = cgroup / "container"
    group.mkdir()
    init = subprocess.Popen(["sleep", "infinity"])
    try:
        (group / "cgroup.procs").write_text(str(init.pid))
        hook(walled, json.dumps({"id": "c1", "pid": init.pid, "bundle": "/b"}), "bind", name)
        assert walls(walled) == {"container": {0: 2048}}
        assert limit_by(walled) == ["driver"]
        walled.ctl("resize", name, "--memory", "3GiB")
        assert walls(walled) == {"container": {0: 3072}}
    finally:
        init.kill()
        init.wait()
    eventually(lambda: not states(walled), "the container has ended", 60)
    assert walls(walled) == {}


@needs("cgroups", "root")
def test_a_container_in_a_container_stays_within_the_limit(walled: DemoNode, cgroup: Path) -> None:  # noqa: F811
    """The inner container has a control group below that of the outer one, and no libvgpu."""
    walled.start()
    asked = {"vgpud.io/memory": "2GiB", "vgpud.io/isolation": "quota", "vgpud.io/device": "0"}
    config = {"annotations": asked, "process": {"env": [], "user": {"uid": 0, "gid": 0}}}
    hook(walled, json.dumps(config), "precreate")
    outer, inner = cgroup / "outer", cgroup / "outer" / "inner"
    inner.mkdir(parents=True)
    init = subprocess.Popen(["sleep", "infinity"])
    (outer / "cgroup.procs").write_text(str(init.pid))
    program = [*stripped(walled), sys.executable, "-c", GREEDY, "0", str(RTLD_NOW)]
    try:
        hook(walled, json.dumps({"id": "c1", "pid": init.pid, "bundle": "/b"}), "bind", only(walled))
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(inner), *program]
        done = subprocess.run(enter, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=300)
        assert json.loads(done.stdout)["mib"] == 1472  # 2 GiB minus a context of 526 MiB, in steps of 64 MiB
    finally:
        init.kill()
        init.wait()


@pytest.fixture
def cluster_node(tmp_path: Path, cgroup: Path) -> Iterator[DemoNode]:  # noqa: F811
    """A daemon on driver branch 615 with a resource for pods. It is not started."""
    for node in node_of(tmp_path, cgroup, "615", MEMORY_UNITS):
        root = node.folder / "k"
        node.environment |= {
            "VGPUD_KUBELET_DIR": str(root),
            "VGPUD_DEVICE_PLUGINS_DIR": str(fixed_plugins(root)),
            "VGPUD_CGROUP": f"{cgroup.name}/own",
        }
        yield node


@needs("cgroups", "root")
def test_each_container_of_a_pod_is_behind_a_memory_wall(cluster_node: DemoNode, cgroup: Path) -> None:  # noqa: F811
    node = cluster_node
    with containers_of(node, cgroup) as (name, inits):
        ((device, both),) = walls(node)["init"].items()
        assert both == 2048 and walls(node)["main"] == {device: 2048}
        assert limit_by(node) == ["driver"]
        inits["init"].kill()
        inits["init"].wait()
        (cgroup / "init").rmdir()
        node.kill()
        node.start()
        assert limit_by(node) == ["driver"]
        assert walls(node) == {"main": {device: 2048}}
        node.ctl("resize", name, "--memory", "3GiB")
        assert walls(node) == {"main": {device: 3072}}


@needs("cgroups", "root", "python-index")
def test_a_container_of_a_claim_is_behind_a_memory_wall_and_its_pod_is_named(
    tmp_path: Path,
    cgroup: Path,  # noqa: F811
    cluster: tuple[Cluster, HttpCluster],  # noqa: F811
) -> None:
    made, served = cluster
    for node in node_of(tmp_path, cgroup, "615", DRA_POLICY):
        join(node, served)
        node.environment["VGPUD_CGROUP"] = f"{cgroup.name}/own"
        node.start()

        async def prepared(to: DemoNode = node) -> dict[str, Any]:
            await published(made, 8)
            claim = made.allocate("part", "quota", {"memory": "7Gi"})
            assert claim is not None
            assert (await ask(to, "Prepare", claim)).error == ""
            return claim

        claim = asyncio.run(prepared())
        name = only(node)
        (spec,) = (node.folder / "cdi").glob(f"*{name}.json")
        hooks = json.loads(spec.read_text())["devices"][0]["containerEdits"]["hooks"]
        assert ["bind", name] in [one["args"][-2:] for one in hooks]
        group = cgroup / "main"
        group.mkdir()
        init = subprocess.Popen(["sleep", "infinity"])
        try:
            (group / "cgroup.procs").write_text(str(init.pid))
            told = {f"io.kubernetes.cri.{key}": value for key, value in POD_NAMES.items()}
            state = {"id": "main", "pid": init.pid, "bundle": "/b", "annotations": told}
            hook(node, json.dumps(state), "bind", name)
            assert list(walls(node)["main"].values()) == [7 * 1024]
            assert limit_by(node) == ["driver"]
            assert "ml/train-0/main" in node.ctl("ls", "-o", "wide").stdout
            node.kill()
            node.start()
            assert list(walls(node)["main"].values()) == [7 * 1024]
        finally:
            init.kill()
            init.wait()
        assert asyncio.run(ask(node, "Unprepare", claim)).error == ""
        assert walls(node) == {}


@needs("cgroups", "root")
def test_a_forced_release_of_a_pod_that_a_crash_cuts_allows_its_containers_no_more_memory(
    cluster_node: DemoNode,
    cgroup: Path,  # noqa: F811
) -> None:
    node = cluster_node
    with containers_of(node, cgroup) as (name, _):
        node.kill()
        node.start(fault_point="release.record-intent")
        node.ctl("release", name, "--force", check=False)
        assert node.daemon is not None
        node.daemon.wait(timeout=300)
        node.start()
        eventually(lambda: not states(node), "the release is completed")
        limits = [limit for group in walls(node).values() for limit in group.values()]
        assert limits == [0, 0]  # the processes of the containers live, and get no more memory
