"""The changes that a reload of the policy reports as done, and those that it reports as waiting."""

from dataclasses import replace
from pathlib import Path

from vgpud.model.device import Device, Node
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode, Slice
from vgpud.model.view import ReloadReport
from vgpud.node.devices.policies import reload_report
from vgpud.planner.use import EMPTY
from vgpud.policy.load import LoadedPolicy, check

CARD = Device(uuid="GPU-1", index=0, name="a card", memory_total_bytes=80 * GIB)
NODE = Node(devices=(CARD,))
HELD = {"GPU-1": EMPTY.with_slice(Slice("GPU-1", Mode.PRELOAD, GIB))}


def loaded(folder: Path, text: str) -> LoadedPolicy:
    path = folder / "vgpud.toml"
    path.write_text(f"version = 1\n{text}\n")
    return check(path)


def report(folder: Path, before: str, after: str) -> ReloadReport:
    return reload_report(loaded(folder, before), loaded(folder, after), NODE, HELD)


def test_a_change_of_the_compute_engine_waits_for_the_end_of_tenants(tmp_path: Path) -> None:
    said = report(tmp_path, "", '[[device]]\npreload.engine = "gate"')
    assert said.waiting == ("device 0: preload.engine: auto becomes gate when its 1 allocation is gone",)
    assert said.done == ()


def test_settings_changed_together_with_the_engine_are_reported_as_done(tmp_path: Path) -> None:
    said = report(tmp_path, "", '[[device]]\npreload.engine = "gate"\npreload.max_tenants = 8')
    assert said.done == ("device 0: preload.max_tenants: 64 becomes 8",)
    assert len(said.waiting) == 1


def test_a_policy_reload_that_changes_a_mode_also_reports_the_other_changes_of_the_rule(
    tmp_path: Path,
) -> None:
    said = report(tmp_path, "", '[[device]]\nmode = "preload"\npreload.max_tenants = 8\non_sick = "move"')
    assert said.done == (
        "device 0: mode auto becomes preload",
        "device 0: on_sick: drain becomes move",
        "device 0: preload.max_tenants: 64 becomes 8",
    )


def test_a_change_that_several_devices_have_in_common_is_reported_once(tmp_path: Path) -> None:
    node = Node(devices=(CARD, replace(CARD, uuid="GPU-2", index=1)))
    changed = '[[device]]\non_sick = "report"\nmig.foreign = "lend"'
    said = reload_report(loaded(tmp_path, ""), loaded(tmp_path, changed), node, {})
    assert said.done == (
        "devices 0, 1: on_sick: drain becomes report",
        "devices 0, 1: mig.foreign: keep becomes lend",
    )


def test_a_policy_reload_reports_that_preload_turn_makes_memory_evictable(tmp_path: Path) -> None:
    said = report(tmp_path, "", '[[device]]\npreload.turn = "30s"')
    assert "device 0: preload.evictable: false becomes true" in said.done
    before, after = "preload.evictable = true", 'preload.idle_suspend = "60s"'
    said = report(tmp_path, f"[[device]]\n{before}", f"[[device]]\n{after}")
    assert said.done == ("device 0: preload.idle_suspend: off becomes 1min",)


def test_a_policy_reload_names_each_changed_key_that_concerns_the_whole_node(tmp_path: Path) -> None:
    said = report(tmp_path, "", "[runtime]\nusers = true\n[[quota]]\nmax_devices = 3")
    assert said.done == (
        "runtime.users: false becomes true",
        "quotas changed, 1 rule: what is held stays held",
    )


def test_a_policy_reload_says_which_remote_settings_wait_for_a_restart_of_their_service(
    tmp_path: Path,
) -> None:
    before, after = ('[remote]\nserver = "/a"\ngrace = "5s"', '[remote]\nserver = "/b"\ngrace = "9s"')
    assert report(tmp_path, before, after).done == (
        "remote.server: /a becomes /b",
        "remote.grace: 5s becomes 9s at the next restart of vgpud-remote.service",
    )
