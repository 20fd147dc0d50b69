"""Which engine a device's preload tenants get, and why."""

from dataclasses import replace

import pytest

from vgpud.model import engine as model
from vgpud.model.device import Device, Mig, Virtualisation
from vgpud.model.engine import Engine, EngineReason, EngineVerdict
from vgpud.planner import engine as planner
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
def test_the_engine_follows_from_policy_device_and_verdict(
    setting: str, device: Device, verdict: EngineVerdict | None, engine: Engine, reason: EngineReason
) -> None:
    choice = choose_engine(setting, device, verdict)
    assert (choice.engine, choice.reason) == (engine, reason)
    assert is_fallback(setting, choice) == (setting == "cut" and engine is Engine.GATE)


def test_a_gate_says_what_the_probe_said() -> None:
    assert choose_engine("cut", DEVICE, REFUSED).why == REFUSED.why


@pytest.mark.parametrize("default", [Engine.CUT, Engine.GATE])
def test_auto_is_what_one_constant_says(monkeypatch: pytest.MonkeyPatch, default: Engine) -> None:
    monkeypatch.setattr(planner, "AUTO_ENGINE", default)
    assert choose_engine("auto", DEVICE, PROVED).engine is default
    asks = choose_engine("auto", DEVICE, None)
    assert asks.engine is (Engine.UNKNOWN if default is Engine.CUT else Engine.GATE)
    assert model.AUTO_ENGINE in (Engine.CUT, Engine.GATE)
