"""Several compute instances in one GPU instance, with a whole vgpud on a simulated node."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.conditions import needs, unmet
from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, PROBE, client, eventually, release, simulate, states
from tests.mig.world import allocate, apply, device, fill, make_by_hand, nvml, place, standing, target
from tests.sim import outside
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

ON_TOP = 'version = 1\n[[device]]\nmode = "mig"\nmig.on_top = ["preload", "mps"]\nmps.check_seconds = 0.5\n'


def parts(node: DemoNode, index: int = 0) -> list[str]:
    """PROFILE@MEMORY SLICE/COMPUTE SLICE of every compute instance that is part of a divided GPU instance."""
    return sorted(
        f"{i.profile_name}@{i.placement.start}/{i.compute_placement.start}"
        for i in device(node, index).instances
        if i.HasField("gpu_instance_id") and i.HasField("compute_placement")
    )


def nodes_of(held: pb.Allocation) -> list[str]:
    return [n.path for n in held.edits.device_nodes if "nvidia-caps" in n.path]


def test_compute_instances_are_made_and_destroyed_with_their_tenants(node: DemoNode) -> None:
    """Three compute instances in one GPU instance have a UUID and exactly two capability nodes each."""
    node.start()
    held = [allocate(node, "1c.3g.71gb") for _ in range(3)]
    migs = [one.slices[0].mig for one in held]
    assert len({mig.gpu_instance_id for mig in migs}) == 1
    assert len({mig.uuid for mig in migs}) == 3
    assert [one.edits.env["CUDA_VISIBLE_DEVICES"] for one in held] == [mig.uuid for mig in migs]
    nodes = [nodes_of(one) for one in held]
    assert [len(paths) for paths in nodes] == [2, 2, 2]
    assert len({paths[0] for paths in nodes}) == 1, "the GPU instance's"
    assert len({paths[1] for paths in nodes}) == 3, "the compute instances'"
    for one, paths in zip(held, nodes, strict=True):
        spec = (node.folder / "cdi" / f"vgpud.io-vgpu_{one.id}.json").read_text()
        assert spec.count("nvidia-caps/") == 2
        assert all(path in spec for path in paths)
    fourth = allocate(node, "2c.3g.71gb")
    assert fourth.slices[0].mig.gpu_instance_id != migs[0].gpu_instance_id, "there is no room for two more"
    release(node, held[0].id, held[2].id)
    assert len(parts(node)) == 2, "only theirs went"
    listed = {i.allocation_id for i in device(node).instances}
    assert listed == {held[1].id, fourth.id}
    release(node, held[1].id, fourth.id)
    shown = device(node)
    assert (list(shown.instances), shown.current) == ([], False), "the last takes the GPU instance along"


def test_tenants_outlive_a_restart_of_vgpud_and_a_reboot_makes_their_compute_instances_again(
    node: DemoNode,
) -> None:
    node.start()
    held = [allocate(node, "1c.4g.71gb") for _ in range(2)]
    before = parts(node)
    node.kill()
    node.start()
    assert parts(node) == before
    assert {one.id for one in held} == states(node).keys()
    apply(node, " ".join(f"1c.4g.71gb@{held[0].slices[0].mig.placement.start}" for _ in range(2)))
    release(node, held[1].id)
    assert parts(node) == before, "they are of the layout now"
    simulate(node, "reboot")
    node.kill()
    node.start()
    assert parts(node) == before
    assert [i.allocation_id for i in device(node).instances].count(held[0].id) == 1


def killed(node: DemoNode, error: VgpuError) -> None:
    assert error.code is ErrorCode.UNREACHABLE
    assert node.daemon is not None
    assert node.daemon.wait(300) == -9


def test_a_vgpud_killed_after_it_made_a_compute_instance_leaves_no_instance(node: DemoNode) -> None:
    node.start()
    first = allocate(node, "1c.3g.71gb")
    before = parts(node)
    node.stop()
    node.start(fault_point="allocate.attach-0")
    with pytest.raises(VgpuError) as cut:
        allocate(node, "1c.3g.71gb", request_id="r")
    killed(node, cut.value)
    node.start()
    assert len(parts(node)) == 1
    again = allocate(node, "1c.3g.71gb", request_id="r")
    assert len(parts(node)) == 2
    assert set(before) < set(parts(node)), "the other tenant's was not touched"
    release(node, first.id, again.id)
    assert standing(node) == set()


def test_the_release_of_a_compute_instance_that_is_killed_after_any_step_is_finished(
    node: DemoNode,
) -> None:
    node.start()
    for point in ("record-intent", "detach-0"):
        kept, gone = allocate(node, "1c.3g.71gb"), allocate(node, "1c.3g.71gb")
        node.stop()
        node.start(fault_point=f"release.{point}")
        with pytest.raises(VgpuError) as cut:
            release(node, gone.id)
        killed(node, cut.value)
        node.start()
        assert states(node).keys() == {kept.id}, point
        assert len(parts(node)) == 1, point
        release(node, kept.id)
        assert standing(node) == set(), point


def test_a_layout_change_killed_after_a_step_is_finished_by_the_next_start(node: DemoNode) -> None:
    node.start()
    for point, asked in (
        ("destroy-9@4", "2c.3g.71gb@4 1g.18gb@0"),
        ("create-9@4/0@0", "1c.3g.71gb@4 1c.3g.71gb@4 1g.18gb@0"),
    ):
        apply(node, "3g.71gb@4 1g.18gb@0")
        kept = next(i.uuids[0] for i in device(node).instances if i.placement.start == 0)
        node.stop()
        node.start(fault_point=f"mig-apply.{point}")
        with pytest.raises(VgpuError) as cut:
            apply(node, asked)
        killed(node, cut.value)
        node.start()
        assert standing(node) == {*asked.split()}, point
        with client(node) as calls:
            assert not calls.plan_mig(target(asked)).changes, point
        assert kept in {uuid for i in device(node).instances for uuid in i.uuids}, "what both have ran on"


@pytest.mark.parametrize("foreign", ["keep", "lend"])
def test_compute_instances_made_outside_vgpud_are_kept(make_node: NodeMaker, foreign: str) -> None:
    """An administrator makes compute instances, in a GPU instance of the administrator and in one that vgpud
    made.
    """
    node = make_node(policy=f'version = 1\n[[device]]\nmode = "mig"\nmig.foreign = "{foreign}"\n')
    nvml(node, "n.nvmlDeviceSetMigMode(h, 1)")
    make_by_hand(node, profile=9, start=4, size=4, compute=0)
    node.start()
    (theirs,) = device(node).instances
    assert (theirs.profile_name, theirs.own) == ("1c.3g.71gb", False)
    held = allocate(node, "1c.3g.71gb")
    assert (held.slices[0].mig.uuid == theirs.uuids[0]) == (foreign == "lend")
    release(node, held.id)
    assert parts(node) == ["1c.3g.71gb@4/0"], "what others made stays, lent or not"
    ours = allocate(node, "1c.3g.71gb@0")
    gi = ours.slices[0].mig.gpu_instance_id
    nvml(node, f"n.nvmlGpuInstanceCreateComputeInstance(n.nvmlDeviceGetGpuInstanceById(h, {gi}), 0)")
    assert [i.own for i in device(node).instances if i.placement.start == 0] in ([True, False], [False, True])
    release(node, ours.id)
    assert [i.placement.start for i in device(node).instances] == [0, 4], "theirs keeps it standing"
    node.kill()
    node.start()
    assert [i.placement.start for i in device(node).instances] == [0, 4]


def test_memory_limits_hold_on_compute_instances(make_node: NodeMaker) -> None:
    """The hardware does not divide a GPU instance's memory between its compute instances. libvgpu does so if
    the policy asks for it.
    """
    node = make_node(policy=ON_TOP)
    node.start()
    with pytest.raises(VgpuError) as refused, client(node) as calls:
        calls.allocate(pb.AllocateRequest(mig_profile="1c.3g.71gb", memory_bytes=8 * GIB))
    assert refused.value.code is ErrorCode.UNSUPPORTED
    held = [allocate(node, "1c.3g.71gb", isolation="quota", memory_bytes=gib * GIB) for gib in (2, 40)]
    migs = [one.slices[0].mig for one in held]
    assert migs[0].gpu_instance_id == migs[1].gpu_instance_id
    assert GIB < fill(node, held[0])["total_bytes"] <= 2 * GIB
    assert [len(nodes_of(one)) for one in held] == [2, 2]
    third = allocate(node, "1c.3g.71gb", isolation="quota", memory_bytes=40 * GIB)
    assert third.slices[0].mig.placement.start != migs[0].placement.start, "82 GiB are not in one"
    release(node, *(one.id for one in (*held, third)))
    assert standing(node) == set()


def test_the_processes_of_each_tenant_are_listed_in_its_own_compute_instance(node: DemoNode) -> None:
    node.start()
    one, two = allocate(node, "1c.3g.71gb"), allocate(node, "1c.3g.71gb")
    tenant = subprocess.Popen(
        [PROBE, "hold", "256MiB", "--then-wait-on-stdin"],
        env={**node.environment, **one.edits.env, **one.edits.host_env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert tenant.stdout is not None
    assert b"held" in tenant.stdout.readline()
    try:
        busy = {i.allocation_id: [p.pid for p in i.processes] for i in device(node).instances}
        assert busy == {one.id: [tenant.pid], two.id: []}
        said = node.ctl("why", one.id).stdout
        assert "1 of 3 compute slices" in said
        assert "it shares the" in said
        assert "at most" not in said, "an even part is no limit"
        assert "GiB, shared" in node.ctl("show", one.id).stdout
        with client(node) as calls, pytest.raises(VgpuError) as stuck:
            calls.apply_mig(target("7g.141gb"))
        named = f"of allocation {one.id} is in use by pid {tenant.pid} (vgpu-probe, user "
        assert named in stuck.value.sentence
        release(node, two.id)
        assert len(parts(node)) == 1
    finally:
        tenant.communicate()


def test_compute_instances_are_written_to_mig_parted_files_and_shown_by_vgpuctl(
    node: DemoNode, tmp_path: Path
) -> None:
    node.start()
    file = tmp_path / "config.yaml"
    wanted = {"1c.3g.71gb": 3, "2c.4g.71gb": 1}
    entry = {"devices": [0], "mig-enabled": True, "mig-devices": wanted}
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"parts": [entry]}}))
    steps = node.ctl_json("mig", "plan", "--file", str(file))["changes"]
    assert [step["kind"] for step in steps] == ["enable", *["create"] * 4]
    done = node.ctl("mig", "apply", "--file", str(file))
    assert "create 1c.3g.71gb at memory slice 4, compute slice 2" in done.stderr
    assert node.ctl("mig", "assert", "--file", str(file)).returncode == 0
    assert parts(node) == ["1c.3g.71gb@4/0", "1c.3g.71gb@4/1", "1c.3g.71gb@4/2", "2c.4g.71gb@0/0"]
    exported = yaml.safe_load(node.ctl("mig", "export").stdout)["mig-configs"]["current"]
    assert entry in exported
    policy = node.ctl("mig", "import", str(file)).stdout
    assert '"1c.3g.71gb*3"' in policy
    (node.folder / "etc" / "vgpud.toml").write_text(policy)
    assert node.ctl("policy", "check", str(node.folder / "etc" / "vgpud.toml")).returncode == 0
    listed = node.ctl("mig", "ls", "--device", "0").stdout
    assert "4/2" in listed


def test_compute_instances_of_the_policy_are_made_before_vgpud_serves(make_node: NodeMaker) -> None:
    rule = 'version = 1\n[[device]]\nmatch.index = 0\nmode = "mig"\nmig.layout = ["{}"]\n'
    node = make_node(policy=rule.format("1c.3g.71gb*3"))
    node.start()
    assert len(parts(node)) == 3
    held = allocate(node, "1c.3g.71gb")
    with pytest.raises(VgpuError) as full:
        allocate(node, "2c.3g.71gb")
    assert full.value.code is ErrorCode.NO_CAPACITY
    (node.folder / "etc" / "vgpud.toml").write_text(rule.format("3g.71gb"))
    with client(node) as calls:
        calls.reload_policy()
    eventually(lambda: standing(node) == {place(held)} and len(parts(node)) == 1, "only what is held stays")
    release(node, held.id)
    eventually(lambda: standing(node) == {"3g.71gb@4"}, "the rest follows when it is released")


@needs("debian-archive")
def test_nvidia_smi_lists_the_compute_instances_that_vgpud_makes(node: DemoNode) -> None:
    """vgpud treats instances that nvidia-smi makes as made by others."""
    branch = max(outside.SUITES)
    program = outside.nvidia_smi(branch)
    if program is None:
        unmet("debian-archive", outside.why.get("nvidia-smi"))
    node.start()
    held = [allocate(node, "1c.3g.71gb"), allocate(node, "1c.3g.71gb")]
    gi = held[0].slices[0].mig.gpu_instance_id

    def smi(*words: str) -> str:
        done = subprocess.run(
            [str(program), *words],
            env=node.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert smi("mig", "-i", "0", "-lci").count("MIG 1c.3g.71gb") == 2
    listed = smi("-L")
    assert all(one.slices[0].mig.uuid in listed for one in held)
    assert "Successfully created compute instance" in smi("mig", "-i", "0", "-cci", "0", "-gi", str(gi))
    owners = [i.own for i in device(node).instances]
    assert sorted(owners) == [False, True, True]
    release(node, *(one.id for one in held))
    assert [i.own for i in device(node).instances] == [False]
