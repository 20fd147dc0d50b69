"""Reads how the devices of a node are connected."""

from collections.abc import Mapping
from itertools import combinations

from vgpud.hardware.compute import Handle
from vgpud.hardware.nvml import Nvml
from vgpud.model.device import Link

# numbers of nvmlGpuTopologyLevel_t in nvml.h
_LEVELS: dict[int, Link] = {
    0: Link.INTERNAL,
    10: Link.SINGLE,
    20: Link.MULTIPLE,
    30: Link.HOSTBRIDGE,
    40: Link.NODE,
    50: Link.SYSTEM,
}
_NVLINK = 2  # value of NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0  # value of NVML_P2P_STATUS_OK


def read_links(nvml: Nvml, handles: Mapping[str, Handle]) -> dict[tuple[str, str], Link]:
    """The link of every pair of devices (by UUID); each pair is in the result in both orders."""
    links: dict[tuple[str, str], Link] = {}
    for (one, first), (other, second) in combinations(handles.items(), 2):
        links[one, other] = links[other, one] = _link(nvml, first, second)
    return links


def _link(nvml: Nvml, first: Handle, second: Handle) -> Link:
    if nvml.call("nvmlDeviceGetP2PStatus", first, second, _NVLINK) == _P2P_OK:
        return Link.NVLINK
    level = nvml.call("nvmlDeviceGetTopologyCommonAncestor", first, second)
    return _LEVELS.get(level, Link.UNKNOWN)
