"""The compute engine that a device's preload tenants get, and the reason for it."""

from dataclasses import replace

import pytest

from vgpud.model.device import Device, Mig, Virtualisation
from vgpud.model.engine import Engine, EngineReason, EngineVerdict
from vgpud.planner.engine import choose_engine, is_fallback

DEVICE = Device("GPU-1", 0)
GUEST = replace(DEVICE, virtualisation=Virtualisation.VGPU_GUEST)
PARTITIONED = replace(DEVICE, mig=Mig(True, True, True))
PROVED = EngineVerdict(Engine.CUT, "a kernel stood still", "boot", "580.1", off_us=449.0, on_us=275.0)
REFUSED = EngineVerdict(Engine.GATE, "the driver refuses to stop channels: status 0x56", "boot", "580.1")
HUNG = EngineVerdict(Engine.GATE, "the probe did not answer within 35 seconds", "boot", "580.1", failed=True)


@pytest.mark.parametrize(
    ("setting", "device", "verdict", "engine", "reason"),
    [
        ("cut", DEVICE, PROVED, Engine.CUT, EngineReason.PROBED),
        ("cut", DEVICE, None, Engine.UNKNOWN, EngineReason.NOT_PROBED),
        ("cut", DEVICE, REFUSED, Engine.GATE, EngineReason.REFUSED),
        ("cut", DEVICE, HUNG, Engine.GATE, EngineReason.PROBE_FAILED),
        ("cut", GUEST, PROVED, Engine.GATE, EngineReason.VGPU_GUEST),
        ("cut", PARTITIONED, None, Engine.GATE, EngineReason.MIG),
        ("gate", DEVICE, PROVED, Engine.GATE, EngineReason.POLICY),
    ],
)
def test_the_engine_follows_from_policy_device_and_probe_result(
    setting: str, device: Device, verdict: EngineVerdict | None, engine: Engine, reason: EngineReason
) -> None:
    choice = choose_engine(setting, device, verdict)
    assert (choice.engine, choice.reason) == (engine, reason)
    assert is_fallback(setting, choice) == (setting == "cut" and engine is Engine.GATE)


def test_the_reason_for_engine_gate_is_the_one_that_the_probe_gave() -> None:
    assert choose_engine("cut", DEVICE, REFUSED).why == REFUSED.why


@pytest.mark.parametrize("device", [DEVICE, GUEST, PARTITIONED])
@pytest.mark.parametrize("verdict", [PROVED, REFUSED, HUNG, None])
def test_the_settings_auto_and_cut_choose_the_same_engine(
    device: Device, verdict: EngineVerdict | None
) -> None:
    assert choose_engine("auto", device, verdict) == choose_engine("cut", device, verdict)


@pytest.mark.parametrize(
    ("device", "verdict", "told"),
    [(DEVICE, PROVED, False), (DEVICE, REFUSED, True), (DEVICE, HUNG, True), (PARTITIONED, None, False)],
)
def test_under_setting_auto_the_gate_counts_as_a_fallback_only_if_the_probe_failed(
    device: Device, verdict: EngineVerdict | None, told: bool
) -> None:
    assert is_fallback("auto", choose_engine("auto", device, verdict)) == told
