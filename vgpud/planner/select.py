"""Selects the devices that match a request's selector. All given keys must match."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from vgpud.model.device import Device, Node
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Selector
from vgpud.planner.words import listed

ANY = Selector()


def selects(selector: Selector, device: Device) -> bool:
    return (
        (not selector.uuids or device.uuid in selector.uuids)
        and (not selector.indices or device.index in selector.indices)
        and (not selector.name_glob or fnmatchcase(device.name, selector.name_glob))
    )


def selector_error(selector: Selector, node: Node, selected: Sequence[Device]) -> VgpuError | None:
    """The error NO_SUCH_DEVICE if the selector names a missing device or matches none; None otherwise."""
    if not node.devices:
        return VgpuError(
            ErrorCode.NO_SUCH_DEVICE,
            "this node has no device",
            "see 'vgpuctl status' for whether the NVIDIA driver answers",
        )
    uuids = tuple(device.uuid for device in node.devices)
    for uuid in selector.uuids:
        if uuid not in uuids:
            close = get_close_matches(uuid, uuids, n=1)
            return _missing(f"no device has uuid {uuid!r}", close[0] if close else listed(uuids))
    indices = tuple(device.index for device in node.devices)
    for index in selector.indices:
        if index not in indices:
            return _missing(f"no device has index {index}", listed(tuple(str(i) for i in indices)))
    if not selected:
        names = tuple(dict.fromkeys(device.name for device in node.devices))
        given = _spelled(selector)
        return _missing(f"no device matches {given}", listed(names))
    return None


def _spelled(selector: Selector) -> str:
    keys = (
        ("uuid", listed(selector.uuids)),
        ("index", listed(tuple(str(i) for i in selector.indices))),
        ("name", selector.name_glob),
    )
    return " and ".join(f"{key} {value}" for key, value in keys if value)


def _missing(sentence: str, there: str) -> VgpuError:
    return VgpuError(ErrorCode.NO_SUCH_DEVICE, sentence, f"the node has {there}; see 'vgpuctl devices'")
