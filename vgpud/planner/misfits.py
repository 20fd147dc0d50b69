"""Finds settings of a policy that the devices of a node cannot fulfil. Pure."""

from collections.abc import Iterator

from vgpud.model.device import Device, Node
from vgpud.model.errors import VgpuError
from vgpud.planner.geometry import geometry_for
from vgpud.planner.layouts import OFF, Blocked, target
from vgpud.planner.mig_parts import split
from vgpud.planner.words import listed
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.origin import BUILT_IN, Problem


def misfits(loaded: LoadedPolicy, node: Node) -> tuple[Problem, ...]:
    """Finds rules that name a missing device, and MIG layouts that a device can never have.

    A rule that matches by name, memory or capability may match nothing, because one policy serves many nodes.
    A node without devices, whose driver does not answer, has no misfits.
    """
    return (*_absent(loaded, node), *_layouts(loaded, node)) if node.devices else ()


def _absent(loaded: LoadedPolicy, node: Node) -> Iterator[Problem]:
    present = {device.index for device in node.devices}
    uuids = {device.uuid for device in node.devices}
    for number, rule in enumerate(loaded.policy.device):
        key = f"device[{number}].match"
        missing = [index for index in rule.match.index or () if index not in present]
        if missing:
            sentence = f"the node has no device {listed(tuple(map(str, missing)))}"
            yield _problem(loaded, f"{key}.index", sentence, f"its indexes are {_spans(present)}")
        if rule.match.uuid is not None and rule.match.uuid not in uuids:
            sentence = f"the node has no device {rule.match.uuid}"
            yield _problem(loaded, f"{key}.uuid", sentence, "see 'nvidia-smi -L'")


def _layouts(loaded: LoadedPolicy, node: Node) -> Iterator[Problem]:
    told: set[str] = set()
    for device in node.devices:
        rule = loaded.policy.rule_for(device)
        key = f"device[{loaded.policy.device.index(rule)}].mig.layout" if rule in loaded.policy.device else ""
        words = rule.settings_mig().layout if rule.mode in ("auto", "mig") else None
        if not key or key in told or not words or words == (OFF,):
            continue
        why = _why_not(device, words)
        if why is not None:
            told.add(key)
            yield _problem(loaded, key, f"device {device.index}: {why.sentence}", why.hint)


def _why_not(device: Device, words: tuple[str, ...]) -> VgpuError | None:
    if not device.mig.profiles:
        return None
    geometry = geometry_for(device.mig.profiles)
    try:
        plain, _ = split(geometry, words)
        empty = geometry.layout((), ())
        found = target(geometry, empty, 0, plain)
        assert not isinstance(found, Blocked), "an empty card blocks nothing"
    except VgpuError as error:
        return error
    return None


def _problem(loaded: LoadedPolicy, key: str, sentence: str, hint: str) -> Problem:
    return Problem(loaded.origins.get(key, BUILT_IN), key, sentence, hint)


def _spans(indices: set[int]) -> str:
    low, high = min(indices), max(indices)
    return (
        f"{low} to {high}"
        if indices == set(range(low, high + 1))
        else listed(tuple(map(str, sorted(indices))))
    )
