"""Chooses the engine for a device's tenants in mode preload, from the policy, the device and the probe's
verdict.
"""

from vgpud.model.device import Device, Virtualisation
from vgpud.model.engine import Engine, EngineChoice, EngineReason, EngineVerdict


def choose_engine(setting: str, device: Device, verdict: EngineVerdict | None) -> EngineChoice:
    """The engine of a device and the reason; Engine.UNKNOWN if the probe must run first. `setting` is the
    policy's engine for the device.
    """
    if setting == Engine.GATE:
        return _gate(EngineReason.POLICY, "the policy says gate")
    if device.virtualisation is Virtualisation.VGPU_GUEST:
        return _gate(
            EngineReason.VGPU_GUEST, "this node is a guest with a vGPU, whose channels are its host's"
        )
    if device.mig.current:
        return _gate(EngineReason.MIG, "MIG instances have the gate: no card was tried")
    return _judge(verdict)


def _judge(verdict: EngineVerdict | None) -> EngineChoice:
    if verdict is None:
        return EngineChoice(
            Engine.UNKNOWN, EngineReason.NOT_PROBED, "the probe runs when the first tenant comes"
        )
    if verdict.failed:
        return _gate(EngineReason.PROBE_FAILED, verdict.why)
    if verdict.engine is Engine.CUT:
        return EngineChoice(Engine.CUT, EngineReason.PROBED, verdict.why)
    return _gate(EngineReason.REFUSED, verdict.why)


def is_fallback(setting: str, choice: EngineChoice) -> bool:
    """Does the device have the gate although the policy asks for cut, or asks for auto and the probe failed
    or was refused by the driver?
    """
    if choice.engine is not Engine.GATE or setting == Engine.GATE:
        return False
    return setting == Engine.CUT or choice.reason in (EngineReason.REFUSED, EngineReason.PROBE_FAILED)


def _gate(reason: EngineReason, why: str) -> EngineChoice:
    return EngineChoice(Engine.GATE, reason, why)
