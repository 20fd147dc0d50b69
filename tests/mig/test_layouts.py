"""MIG layouts with a whole vgpud on a simulated node."""

import subprocess
from pathlib import Path

import pytest

from tests import prepared
from tests.conditions import needs
from tests.demo.node import BUILD, POLICY, DemoNode
from tests.e2e.conftest import ROOMY, NodeMaker
from tests.e2e.support import PROBE, client, eventually, helper_pids, release, simulate
from tests.e2e.test_move import move
from tests.e2e.test_suspend import end, holding
from tests.mig.world import allocate, apply, device, make_by_hand, nvml, place, standing, target
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError

BALANCED = {"3g.71gb@4", "2g.35gb@2", "1g.18gb@0", "1g.18gb@1"}


def health(node: DemoNode) -> str:
    with client(node) as calls:
        return calls.list_devices().devices[0].health


def test_a_mig_layout_is_applied_and_kept_and_requests_get_its_instances(node: DemoNode) -> None:
    node.start()
    apply(node, "all-balanced")
    assert standing(node) == BALANCED
    held = allocate(node, "3g.71gb")
    assert place(held) == "3g.71gb@4"
    release(node, held.id)
    assert standing(node) == BALANCED, "a layout stays when its tenants go"
    with pytest.raises(VgpuError) as full:
        allocate(node, "4g.71gb")
    assert full.value.code is ErrorCode.NO_CAPACITY
    node.kill()
    node.start()
    assert standing(node) == BALANCED
    simulate(node, "reboot")
    node.kill()
    node.start()
    assert standing(node) == BALANCED, "it is made again after a reboot"
    apply(node, "auto")
    shown = device(node)
    assert (standing(node), shown.current, shown.origin) == (set(), False, "")


@needs("driver-580")
def test_a_mig_layout_is_made_again_after_the_reset_that_a_sick_device_asked_for(node: DemoNode) -> None:
    node.start()
    apply(node, "all-balanced")
    simulate(node, "fault", "recovery", "--device", "0", "--code", "1")
    eventually(lambda: health(node) == "sick", "NVML asks for a reset")
    simulate(node, "reset", "0")
    eventually(lambda: health(node) == "ok", "the reset is done")
    eventually(lambda: standing(node) == BALANCED, "the layout is made again")


def test_a_mig_layout_is_made_again_when_a_device_that_was_drained_for_a_reset_is_undrained(
    node: DemoNode,
) -> None:
    node.start()
    apply(node, "all-balanced")
    node.ctl("drain", "0")
    simulate(node, "reset", "0")
    assert standing(node) == set()
    node.ctl("undrain", "0")
    eventually(lambda: standing(node) == BALANCED, "the layout is made again")


def test_mig_instances_that_are_in_the_old_and_the_new_layout_stay(node: DemoNode) -> None:
    node.start()
    apply(node, "3g.71gb@4 1g.18gb@0 1g.18gb@1")
    before = {i.uuids[0] for i in device(node).instances}
    done = apply(node, "3g.71gb@4 1g.18gb@0 2g.35gb@2")
    assert [(c.kind, c.profile_name) for c in done.changes] == [("destroy", "1g.18gb"), ("create", "2g.35gb")]
    assert len(before & {i.uuids[0] for i in device(node).instances}) == 2


def test_tenants_that_block_a_layout_keep_running_and_are_named(node: DemoNode) -> None:
    node.start()
    held = allocate(node, "1g.18gb")
    at = place(held)
    with client(node) as calls:
        refused = calls.plan_mig(target("7g.141gb")).refusal
        assert refused.number == ErrorCode.DEVICE_IN_USE.number
        assert held.id in refused.sentence
        with pytest.raises(VgpuError) as stuck:
            calls.apply_mig(target("7g.141gb"))
        assert stuck.value.code is ErrorCode.DEVICE_IN_USE
        assert calls.plan_mig(target("off")).refusal.number == ErrorCode.DEVICE_IN_USE.number
    assert standing(node) == {at}, "a refusal changes nothing"
    assert device(node).origin == ""
    apply(node, "3g.71gb 1g.18gb")
    assert at in standing(node)
    release(node, held.id)
    assert at in standing(node), "it belongs to the layout now"


def test_layouts_of_the_policy_are_applied_before_vgpud_serves(make_node: NodeMaker) -> None:
    policy = """version = 1
[[device]]
match.index = 0
mode = "mig"
mig.layout = ["3g.71gb@0", "1g.18gb*2"]
[[device]]
match.index = 1
mode = "mig"
mig.layout = ["none"]
"""
    node = make_node(policy=policy)
    node.start()
    assert {word.partition("@")[0] for word in standing(node)} == {"3g.71gb", "1g.18gb"}
    assert "3g.71gb@0" in standing(node)
    assert len(standing(node)) == 3
    assert (device(node, 1).current, standing(node, 1), device(node, 1).origin) == (True, set(), "policy")
    before = standing(node)
    simulate(node, "reboot")
    node.kill()
    node.start()
    assert {w.partition("@")[0] for w in standing(node)} == {w.partition("@")[0] for w in before}


def test_a_new_mig_layout_of_the_policy_is_completed_when_tenants_end(make_node: NodeMaker) -> None:
    rule = 'version = 1\n[[device]]\nmatch.index = 0\nmode = "mig"\nmig.layout = ["{}"]\n'
    node = make_node(policy=rule.format("all-1g.18gb"))
    node.start()
    assert len(standing(node)) == 7
    held = allocate(node, "1g.18gb")
    (node.folder / "etc" / "vgpud.toml").write_text(rule.format("7g.141gb"))
    with client(node) as calls:
        calls.reload_policy()
    eventually(lambda: standing(node) == {place(held)}, "only what is held stays")
    release(node, held.id)
    eventually(lambda: standing(node) == {"7g.141gb@0"}, "the rest follows when it is released")


def test_a_layout_of_the_policy_waits_for_tenants_in_another_mode(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    with client(node) as calls:
        held = calls.allocate(pb.AllocateRequest(memory_bytes=1 << 30, selector=pb.Selector(indices=[0])))
        assert held.slices[0].mode == "preload"
        rule = 'version = 1\n[[device]]\nmatch.index = 0\nmode = "mig"\nmig.layout = ["7g.141gb"]\n'
        (node.folder / "etc" / "vgpud.toml").write_text(rule)
        assert "mode auto becomes mig when its 1 allocation" in calls.reload_policy().waiting[0]
    assert standing(node) == set()
    release(node, held.id)
    eventually(lambda: standing(node) == {"7g.141gb@0"}, "the layout follows when the device is idle")


@needs("driver-580")
def test_a_mig_layout_of_the_policy_is_applied_when_the_last_tenant_is_moved_away(
    make_node: NodeMaker,
) -> None:
    rule = 'version = 1\n[[device]]\nmatch.index = 0\nmode = "mig"\nmig.layout = ["7g.141gb"]\n'
    node = make_node(policy=ROOMY)
    node.start()
    tenant, name = holding(node)
    (node.folder / "etc" / "vgpud.toml").write_text(ROOMY.replace("version = 1\n", rule))
    with client(node) as calls:
        assert "mode auto becomes mig when its 1 allocation" in calls.reload_policy().waiting[0]
    assert standing(node) == set()
    assert move(node, name, 1).state == "active"
    eventually(lambda: standing(node) == {"7g.141gb@0"}, "the layout follows when the device is idle")
    end(node, tenant, name)


def test_a_rule_with_mode_unmanaged_restores_the_devices_original_state(make_node: NodeMaker) -> None:
    node = make_node(policy='version = 1\n[[device]]\nmode = "mig"\nmig.layout = ["all-balanced"]\n')
    node.start()
    assert standing(node) == BALANCED
    (node.folder / "etc" / "vgpud.toml").write_text('version = 1\n[[device]]\nmode = "unmanaged"\n')
    with client(node) as calls:
        calls.reload_policy()
    eventually(lambda: not device(node).current, "instances and MIG mode are as they were before vgpud")
    assert nvml(node, "print(n.nvmlDeviceGetMigMode(h))") == "[0, 0]"


def test_a_rule_with_mode_unmanaged_also_removes_a_layout_that_an_administrator_applied(
    make_node: NodeMaker,
) -> None:
    node = make_node()
    node.start()
    apply(node, "3g.71gb@4")
    (node.folder / "etc" / "vgpud.toml").write_text('version = 1\n[[device]]\nmode = "unmanaged"\n')
    with client(node) as calls:
        calls.reload_policy()
    eventually(lambda: not device(node).current, "nothing is wanted of an unmanaged device")


def test_vgpuctl_restore_undoes_the_changes_of_devices_before_a_removal_of_vgpud(
    make_node: NodeMaker,
) -> None:
    node = make_node(policy=POLICY + "[device.mps]\nexclusive_process = true\n")
    node.start()
    apply(node, "3g.71gb@4 1g.18gb*2")
    allocate(node, "1g.18gb")
    with client(node) as calls:
        for index in (1, 2):
            asked = pb.AllocateRequest(isolation="compute", memory_bytes=1 << 30, share_percent=10)
            asked.selector.indices.append(index)
            share = calls.allocate(asked)
        calls.drain_device(share.slices[0].device_uuid, False)
    tenant = subprocess.Popen(
        [PROBE, "hold", "1MiB", "--then-wait-on-stdin"],
        env={**node.environment, **share.edits.env, **share.edits.host_env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert tenant.stdout is not None
    assert b"held" in tenant.stdout.readline()
    assert restore(node).returncode != 0, "not beside a vgpud that runs"
    node.kill()
    busy = restore(node)
    assert busy.returncode == 1
    assert share.id in busy.stderr
    assert "device 2: compute_mode" in busy.stderr
    assert "device 0" not in busy.stderr
    assert "device 1" not in busy.stderr
    modes = (
        "print(n.nvmlDeviceGetMigMode(h), "
        "[n.nvmlDeviceGetComputeMode(n.nvmlDeviceGetHandleByIndex(i)) for i in (1, 2)])"
    )
    assert nvml(node, modes) == "[0, 0] [0, 3]"
    tenant.communicate()
    done = restore(node)
    assert (done.returncode, nvml(node, modes)) == (0, "[0, 0] [0, 0]"), done.stderr
    assert not helper_pids(node)


def restore(node: DemoNode) -> subprocess.CompletedProcess[str]:
    return prepared.ended_daemon(node.environment, "--restore")


def test_mig_instances_made_outside_vgpud_are_kept_unless_the_policy_lends_or_removes_them(
    node: DemoNode,
) -> None:
    nvml(node, "n.nvmlDeviceSetMigMode(h, 1)")
    make_by_hand(node, profile=14, start=0, size=2, compute=1)
    for foreign in ("keep", "lend", "remove"):
        (node.folder / "etc" / "vgpud.toml").write_text(
            f'version = 1\n[[device]]\nmode = "mig"\nmig.foreign = "{foreign}"\n'
        )
        node.start()
        (theirs,) = device(node).instances
        assert (theirs.own, theirs.profile_name, theirs.placement.start) == (False, "2g.35gb", 0)
        held = allocate(node, "2g.35gb")
        assert (place(held) == "2g.35gb@0") == (foreign == "lend")
        release(node, held.id)
        assert standing(node) == {"2g.35gb@0"}, "what others made stays, lent or not"
        if foreign == "remove":
            assert place(allocate(node, "4g.71gb")) == "4g.71gb@0"
        else:
            with pytest.raises(VgpuError) as full:
                allocate(node, "4g.71gb")
            assert full.value.code is ErrorCode.NO_CAPACITY
            assert any("was not made by vgpud" in line for line in full.value.details)
        node.kill()
    node.start()
    assert "2g.35gb@0" not in standing(node)


def test_a_gpu_instance_without_its_compute_instance_is_completed_for_the_next_tenant(node: DemoNode) -> None:
    node.start()
    apply(node, "1g.18gb@6")
    nvml(
        node,
        "g = (n.c_nvmlGpuInstance_t * 8)()\nc = ctypes.c_uint(0)\n"
        "n.nvmlDeviceGetGpuInstances(h, 19, g, ctypes.byref(c))\n"
        "k = (n.c_nvmlComputeInstance_t * 8)()\n"
        "n.nvmlGpuInstanceGetComputeInstances(g[0], 0, k, ctypes.byref(c))\n"
        "n.nvmlComputeInstanceDestroy(k[0])",
    )
    held = allocate(node, "1g.18gb")
    assert place(held) == "1g.18gb@6"
    assert held.slices[0].mig.uuid.startswith("MIG-")


def test_a_layout_that_needs_a_reset_of_an_ampere_card_is_refused_unless_the_policy_allows_resets(
    make_node: NodeMaker,
) -> None:
    node = make_node("a100x8")
    node.start()
    with pytest.raises(VgpuError) as due:
        apply(node, "all-balanced")
    assert due.value.code is ErrorCode.RESET_NEEDED
    assert "mig.reset" in due.value.sentence
    shown = device(node)
    assert (shown.current, shown.pending, shown.origin) == (False, False, ""), "the request was taken back"


def resets(node: DemoNode, index: int) -> None:
    """Gives the node an nvidia-smi that resets this device."""
    tools = node.folder / "tools"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$1 $2" = "--gpu-reset -i" ] || exit 1\n'
        f'exec {BUILD}/bin/vgpu-sim reset --state "$VGPU_SIM_STATE" {index}\n'
    )
    program.chmod(0o755)
    node.environment["PATH"] = f"{tools}:{node.environment['PATH']}"


def test_an_ampere_card_is_reset_to_switch_mig_mode_if_the_policy_allows_it(make_node: NodeMaker) -> None:
    node = make_node("a100x8", policy='version = 1\n[[device]]\nmode = "mig"\nmig.reset = true\n')
    resets(node, 0)
    node.start()
    apply(node, "all-balanced")
    assert len(standing(node)) == 4


def test_defrag_moves_idle_mig_instances_only(make_node: NodeMaker) -> None:
    node = make_node(policy='version = 1\n[[device]]\nmode = "mig"\nmig.dynamic = true\n')
    node.start()
    apply(node, "1g.18gb@0 1g.18gb@6")
    held = allocate(node, "1g.18gb")
    request = pb.MigRequest(defrag=pb.Selector(indices=[0]))
    with client(node) as calls:
        changes = list(calls.plan_mig(request).changes)
        touched = {f"{c.profile_name}@{c.placement.start}" for c in changes if c.kind == "destroy"}
        assert place(held) not in touched
        done = calls.apply_mig(request)
        assert list(done.changes) == changes
        assert not calls.plan_mig(request).changes, "there is nothing left to gain"
    assert place(held) in standing(node)
    assert len(standing(node)) == 2


def capability_nodes(node: DemoNode, allocation: str) -> set[str]:
    with client(node) as calls:
        nodes = calls.get_allocation(allocation).edits.device_nodes
    return {n.path for n in nodes if "nvidia-caps" in n.path}


def test_edits_have_the_two_capability_nodes_of_the_instance_also_after_it_is_made_again(
    node: DemoNode,
) -> None:
    """After a reboot instances have other ids. The device nodes of the old ids might then belong to another
    tenant's instance.
    """
    node.start()
    filler = allocate(node, "1g.18gb")
    held = allocate(node, "2g.35gb")
    before = capability_nodes(node, held.id)
    assert len(before) == 2
    release(node, filler.id)
    gi = held.slices[0].mig.gpu_instance_id
    # destroys the held instance outside vgpud, which makes it again; it then gets the id that `filler` had
    nvml(
        node,
        "import time\n"
        f"old = n.nvmlDeviceGetGpuInstanceById(h, {gi})\n"
        "c = ctypes.c_uint(0)\nk = (n.c_nvmlComputeInstance_t * 8)()\n"
        "n.nvmlGpuInstanceGetComputeInstances(old, 1, k, ctypes.byref(c))\n"
        "n.nvmlComputeInstanceDestroy(k[0])\nn.nvmlGpuInstanceDestroy(old)\n",
    )
    spec = node.folder / "cdi" / f"vgpud.io-vgpu_{held.id}.json"
    spec.write_text(spec.read_text().replace("nvidia-cap", "stale-cap"))
    node.kill()
    node.start()
    after = capability_nodes(node, held.id)
    assert len(after) == 2
    text = spec.read_text()
    assert "stale-cap" not in text
    assert all(path in text for path in after)
    assert text.count("nvidia-caps/") == 2
    assert place(held) in standing(node)


def test_the_cdi_spec_is_rewritten_if_the_driver_numbers_its_device_nodes_anew(node: DemoNode) -> None:
    node.start()
    held = allocate(node, "1g.18gb")
    before = capability_nodes(node, held.id)
    host = node.environment["VGPUD_HOST_ROOT"]
    changed = 0
    for access in Path(host).rglob("access"):
        text = access.read_text()
        if "DeviceFileMinor" in text:
            number = int(text.split("DeviceFileMinor:")[1].split()[0])
            access.write_text(text.replace(f"DeviceFileMinor: {number}", f"DeviceFileMinor: {number + 1000}"))
            changed += 1
    assert changed >= 2
    node.kill()
    node.start()
    after = capability_nodes(node, held.id)
    assert len(after) == 2
    assert not after & before
    spec = (node.folder / "cdi" / f"vgpud.io-vgpu_{held.id}.json").read_text()
    assert all(path in spec for path in after)
    assert not any(f'"{path}"' in spec for path in before)


def test_a_mig_layout_that_the_policy_forbids_is_refused(make_node: NodeMaker) -> None:
    node = make_node(
        policy="""version = 1
[[device]]
match.index = 0
mode = "unmanaged"
[[device]]
match.index = 1
mode = "mps"
[[device]]
match.index = 2
mode = "mig"
mig.change_mode = false
[[device]]
match.index = 3
mode = "auto"
[[device]]
mode = "unmanaged"
"""
    )
    node.start()
    for index in (0, 1, 2):
        with pytest.raises(VgpuError) as denied:
            apply(node, "all-balanced", index)
        assert denied.value.code is ErrorCode.DENIED_BY_POLICY
        assert not device(node, index).current
    apply(node, "all-balanced", 3)
    with client(node) as calls:
        every = pb.MigRequest(targets=[pb.MigTarget(layout=["auto"])])
        touched = {c.device_index for c in calls.plan_mig(every).changes}
    assert touched == {3}, "devices that are not for MIG are left out where none is named"


def test_mig_mode_disabled_by_hand_is_enabled_again(node: DemoNode) -> None:
    node.start()
    apply(node, "none")
    nvml(node, "n.nvmlDeviceSetMigMode(h, 0)")
    assert not device(node).current
    apply(node, "1g.18gb@6")
    assert standing(node) == {"1g.18gb@6"}


def test_every_card_of_a_node_can_be_given_each_of_its_mig_profiles(make_node: NodeMaker) -> None:
    """The placements come from the driver's lists, with +me and other variants. The cards are those of all
    simulated nodes.
    """
    node = make_node("mixed", policy='version = 1\n[[device]]\nmode = "mig"\nmig.reset = true\n')
    resets(node, 2)  # the A100
    node.start()
    with client(node) as calls:
        cards = list(calls.list_mig().devices)
        seen: set[str] = set()
        for card in cards:
            if card.name in seen:
                continue
            seen.add(card.name)
            for free in card.free:
                words = f"all-{free.profile_name}"
                calls.apply_mig(target(words, card.device_index))
                assert len(standing(node, card.device_index)) >= 1, words
            calls.apply_mig(target("all-balanced", card.device_index))
            assert len(standing(node, card.device_index)) >= 3
    assert seen == {"NVIDIA H200", "NVIDIA A100-SXM4-40GB"}
