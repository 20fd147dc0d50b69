"""Finds a device by the operator's name for it: its index, its UUID, or a unique prefix of the UUID."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted

if TYPE_CHECKING:
    from vgpud.api.client import Client

_UUID_CHARACTERS = 40  # length of a UUID as NVML prints it: "GPU-" and a UUID of RFC 9562
_SHOWN = 4


def device_uuid(devices: Iterable[pb.Device], named: str) -> str:
    """Returns the UUID of the device that the operator's text `named` denotes. Raises
    VgpuError(NO_SUCH_DEVICE).
    """
    known = tuple(devices)
    if named.isascii() and named.isdigit():
        found = [device.uuid for device in known if device.index == int(named)]
        if not found and known:
            there = ", ".join(str(device.index) for device in known)
            # the words of planner/select.py, which finds devices for requests
            raise VgpuError(
                ErrorCode.NO_SUCH_DEVICE,
                f"no device has index {int(named)}",
                f"the node has {there}; see 'vgpuctl devices'",
            )
    else:
        found = [device.uuid for device in known if device.uuid == named] or [
            device.uuid for device in known if named and device.uuid.startswith(named)
        ]
    if len(found) != 1:
        which = f": {', '.join(found[:_SHOWN])}{' and more' if len(found) > _SHOWN else ''}" if found else ""
        there = counted(len(known), "device")
        raise VgpuError(
            ErrorCode.NO_SUCH_DEVICE,
            f"{named!r} names {len(found) or 'none'} of the {there} of this node{which}",
            "name one: see 'vgpuctl devices'",
        )
    return found[0]


def complete_uuids(client: "Client", selector: pb.Selector) -> None:
    """Replaces prefixes of UUIDs by whole UUIDs. It asks vgpud for the devices only if there are prefixes.

    Raises VgpuError(NO_SUCH_DEVICE), and the errors of ListDevices.
    """
    if all(len(uuid) >= _UUID_CHARACTERS for uuid in selector.uuids):
        return
    known = client.list_devices().devices
    whole = [device_uuid(known, uuid) for uuid in selector.uuids]
    del selector.uuids[:]
    selector.uuids.extend(whole)
