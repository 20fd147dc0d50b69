"""Engine `cut` through the daemon: chosen by policy and probe, shown by vgpuctl and metrics, kept across
crashes.
"""

import json
import os
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.arbiter.accounts import have_turns, is_held_to
from tests.arbiter.conftest import LONG, counters
from tests.arbiter.test_cut import table
from tests.demo.node import BUILD, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import eventually, states, was_killed
from tests.e2e.test_bypass import events
from vgpud import lease_layout as layout
from vgpud.lease.engines import EngineFiles
from vgpud.model.engine import Engine

CUT = """version = 1
[[device]]
mode = "auto"
[device.preload]
engine = "cut"
"""
KERNEL_US = "1000"
ASKED = ["--isolation", "quota", "--device", "0", "--memory", "2GiB"]
SPIN = ["env", f"VGPU_SIM_KERNEL_US={KERNEL_US}", str(BUILD / "bin" / "vgpu-spin"), "--kernel-us", KERNEL_US]


@pytest.fixture
def cut_node(make_node: NodeMaker) -> DemoNode:
    return make_node(policy=CUT)


def device(node: DemoNode) -> Any:
    return node.ctl_json("devices")["items"][0]


def engine(node: DemoNode) -> tuple[str, str]:
    shown = device(node)
    return shown["engine"], shown["engineReason"]


def in_force(node: DemoNode) -> str:
    """The engine of device 0 in the file that the arbiter reads, or "absent"."""
    path = node.run_dir / "engines" / device(node)["uuid"]
    return path.read_text().split("\n")[0] if path.exists() else "absent"


def reload(node: DemoNode, engine_word: str) -> str:
    Path(node.environment["VGPUD_CONFIG"]).write_text(CUT.replace('"cut"', f'"{engine_word}"'))
    return node.ctl("policy", "reload").stdout


def sim(node: DemoNode, *words: str) -> None:
    program = str(BUILD / "bin" / "vgpu-sim")
    node_environment = {**node.environment, "LD_PRELOAD": ""}
    assert os.spawnve(os.P_WAIT, program, [program, *words], node_environment) == 0


def test_a_tenant_is_held_to_its_share_by_the_engine_cut(cut_node: DemoNode) -> None:
    cut_node.start()
    assert engine(cut_node) == ("unknown", "not-probed")
    tenant = cut_node.tenant([*ASKED, "--cores", "25"], [*SPIN, "--seconds", str(LONG)])
    eventually(lambda: list(states(cut_node).values()) == ["active"], "it is allocated")
    (held,) = states(cut_node)
    assert engine(cut_node) == ("cut", "probed") and in_force(cut_node) == "cut"
    lease = cut_node.run_dir / "leases" / held
    eventually(lambda: table(lease)[0] == 1, "the arbiter has taken it off the device")
    assert counters(lease)["turns"] > 0
    shown = cut_node.ctl("show", held).stdout
    assert "cut, a kernel stopped from outside stood still, went on and ended whole" in shown
    assert "in turns, by the engine cut" in cut_node.ctl("why", held).stdout
    assert "device 0: cut," in cut_node.ctl("doctor", "-v", check=False).stdout
    is_held_to(lease, 25)
    tenant.process.kill()
    tenant.end()
    eventually(lambda: in_force(cut_node) == "absent", "the last tenant has gone")
    assert engine(cut_node) == ("cut", "probed"), "as the next first tenant will have it"


def test_a_driver_that_refuses_preemption_leads_to_the_gate_engine_with_a_reason(cut_node: DemoNode) -> None:
    cut_node.start()
    sim(cut_node, "fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86")
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    assert engine(cut_node) == ("gate", "refused") and in_force(cut_node) == "gate"
    usage = (cut_node.run_dir / "leases" / held / layout.USAGE_FILE).read_bytes()
    assert struct.unpack_from("<I", usage, layout.USAGE_CONTEXT_MIB) == (526,), "measured by the probe"
    diagnosis = cut_node.ctl("doctor", check=False).stdout
    assert "device 0: gate, the driver refuses to stop channels: status 0x56" in diagnosis
    events = cut_node.ctl("events", "-o", "json").stdout
    assert "device 0: its engine is gate: the driver refuses to stop channels" in events
    cut_node.ctl("release", held)


def test_a_reload_changes_the_engine_when_the_last_tenant_has_gone(cut_node: DemoNode) -> None:
    cut_node.start()
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    assert "device 0: preload.engine: cut becomes gate when its 1 allocation" in reload(cut_node, "gate")
    other = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    assert engine(cut_node) == ("cut", "probed") and in_force(cut_node) == "cut"
    for one in (held, other):
        cut_node.ctl("release", one)
    again = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    assert engine(cut_node) == ("gate", "policy") and in_force(cut_node) == "gate"
    cut_node.ctl("release", again)


def test_a_restart_keeps_the_engine_of_running_tenants_and_the_result_of_the_probe(
    cut_node: DemoNode,
) -> None:
    cut_node.start()
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    files = EngineFiles(cut_node.run_dir)
    verdict = files.verdict(device(cut_node)["uuid"])
    cut_node.kill()
    Path(cut_node.environment["VGPUD_CONFIG"]).write_text(CUT.replace('"cut"', '"gate"'))
    cut_node.start()
    assert engine(cut_node) == ("cut", "probed") and in_force(cut_node) == "cut"
    cut_node.ctl("release", held)
    assert files.verdict(device(cut_node)["uuid"]) == verdict is not None


def test_a_new_driver_that_refuses_preemption_leads_to_the_gate_engine_at_the_next_start(
    cut_node: DemoNode,
) -> None:
    """The arbiter still serves the lease. vgpud makes it read the engine again, so that the tenant's next
    program runs under engine `gate`.
    """
    cut_node.start()
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    uuid = device(cut_node)["uuid"]
    cut_node.kill()
    files = EngineFiles(cut_node.run_dir)
    verdict = files.verdict(uuid)
    assert verdict is not None and verdict.engine is Engine.CUT
    files.keep(uuid, replace(verdict, driver_version="570.1"))
    sim(cut_node, "fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86")
    cut_node.start()
    assert engine(cut_node) == ("gate", "refused") and in_force(cut_node) == "gate"
    lease = cut_node.run_dir / "leases" / held
    preload = {"LD_PRELOAD": str(BUILD / "lib" / "libvgpu.so"), "VGPU_LEASE": str(lease)}
    spinning = [*SPIN, "--seconds", str(LONG)]
    program = subprocess.Popen(
        spinning,
        env={**cut_node.environment, **preload, "CUDA_VISIBLE_DEVICES": uuid},
        stdout=subprocess.PIPE,
    )
    try:
        is_held_to(lease, 25)
        assert table(lease)[0] == 0
    finally:
        program.kill()
        program.communicate()
    cut_node.ctl("release", held, "--force")


def test_an_allocation_interrupted_before_or_after_the_choice_of_the_engine_converges(
    cut_node: DemoNode,
) -> None:
    cut_node.start(fault_point="allocate.apply-mode")
    for following in ("allocate.choose-engine", "allocate.attach-0", ""):
        assert cut_node.ctl("alloc", *ASKED, "--cores", "25", check=False).returncode != 0
        was_killed(cut_node)
        cut_node.start(fault_point=following)
        assert in_force(cut_node) == "absent" and states(cut_node) == {}, f"before {following}"
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    assert engine(cut_node) == ("cut", "probed") and in_force(cut_node) == "cut"
    cut_node.ctl("release", held)


def test_a_tenant_from_a_version_without_engines_keeps_the_gate(cut_node: DemoNode) -> None:
    """As after an upgrade from a version without engine files: there is a lease, and no file with the engine
    of its device.
    """
    cut_node.start()
    held = cut_node.ctl("alloc", *ASKED, "--cores", "25").stdout.strip()
    cut_node.kill()
    shutil.rmtree(cut_node.run_dir / "engines")
    cut_node.start()
    assert engine(cut_node) == ("gate", "tenants") and in_force(cut_node) == "gate"
    cut_node.ctl("release", held)


def test_a_device_in_mode_exclusive_has_no_engine_and_is_not_probed(cut_node: DemoNode) -> None:
    cut_node.start()
    held = cut_node.ctl("alloc", "--isolation", "device", "--device", "0").stdout.strip()
    shown = device(cut_node)
    assert (shown["mode"], shown["engine"]) == ("exclusive", "")
    assert not (cut_node.run_dir / "engines").exists()
    cut_node.ctl("release", held)


def test_a_policy_with_an_unknown_engine_is_refused(cut_node: DemoNode) -> None:
    path = Path(cut_node.environment["VGPUD_CONFIG"])
    path.write_text(CUT.replace('"cut"', '"cuts"'))
    done = cut_node.ctl("policy", "check", str(path), check=False)
    assert done.returncode == 78 and "E104" in done.stderr
    assert '"cuts" is not one of auto, cut, gate' in done.stderr + json.dumps(done.stdout)


def test_a_tenant_is_marked_and_gets_the_gate_engine_if_the_driver_begins_to_refuse_preemption(
    cut_node: DemoNode,
) -> None:
    cut_node.start()
    tenant = cut_node.tenant([*ASKED, "--cores", "25"], [*SPIN, "--seconds", str(LONG)])
    eventually(lambda: list(states(cut_node).values()) == ["active"], "it is allocated")
    (held,) = states(cut_node)
    lease = cut_node.run_dir / "leases" / held
    eventually(lambda: counters(lease)["turns"] > 2, "it has turns")
    sim(cut_node, "fault", "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86", "--count", "12")
    sentence = "the driver refused to take it off its device (status 0x56)"
    eventually(lambda: sentence in cut_node.ctl("show", held).stdout, "it is marked")
    assert f"{held} is gated: {sentence}" in cut_node.ctl("doctor", check=False).stdout
    assert events(cut_node, "allocation_gated") == [held]
    have_turns(lease)  # the tenant still gets time slices, now enforced by libvgpu's gate
    is_held_to(lease, 25)
    assert table(lease)[0] == 0
    tenant.process.kill()
    tenant.end()
