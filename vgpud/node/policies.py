"""What changing the policy under a running node means, device by device."""

from collections.abc import Mapping

from vgpud.model.device import Node
from vgpud.model.view import ReloadReport
from vgpud.planner.use import EMPTY, DeviceUse
from vgpud.policy.load import LoadedPolicy


def reload_report(
    old: LoadedPolicy, new: LoadedPolicy, node: Node, use: Mapping[str, DeviceUse]
) -> ReloadReport:
    """A device in use keeps its mode until it is drained; everything else changes at once."""
    if old.digest == new.digest:
        return ReloadReport(changed=False, digest=old.digest)
    done: list[str] = []
    waiting: list[str] = []
    for device in node.devices:
        before, after = old.policy.rule_for(device), new.policy.rule_for(device)
        if before == after:
            continue
        held = use.get(device.uuid, EMPTY)
        change = f"device {device.index}: mode {before.mode} becomes {after.mode}"
        if before.mode == after.mode:
            done.append(f"device {device.index}: settings of mode {after.mode} changed")
        elif held.mode is not None and not after.allows(held.mode):
            waiting.append(f"{change} when its {held.count} allocations in mode {held.mode.value} are gone")
        else:
            done.append(change)
    return ReloadReport(changed=True, digest=new.digest, done=tuple(done), waiting=tuple(waiting))
