"""Reads and writes configurations of NVIDIA's mig-parted, `version: v1` (NVIDIA/mig-parted, README and
examples/config.yaml).

A file has named configurations, which are lists of entries. An entry selects devices and gives their MIG mode
and the number of instances of each profile. If several entries select one device, the last one holds, because
mig-parted applies them in order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl.files import read_text
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted

VERSION = "v1"
OFF, NONE = "off", "none"
_HINT = "see the example in docs/mig.md"
_ENTRY_KEYS = {"devices", "device-filter", "mig-enabled", "mig-devices"}


class Entry(NamedTuple):
    """One entry of a configuration. `indices` and `pci_ids` are None if it selects all devices."""

    indices: frozenset[int] | None
    pci_ids: frozenset[int] | None
    layout: tuple[str, ...]

    def covers(self, device: pb.MigDevice) -> bool:
        return (self.indices is None or device.device_index in self.indices) and (
            self.pci_ids is None or device.pci_device_id in self.pci_ids
        )


def read(name: str, config: str | None) -> tuple[str, tuple[Entry, ...]]:
    """Reads one configuration of a file, and returns its name and entries. Raises VgpuError(BAD_REQUEST) with
    the place of the mistake.
    """
    import yaml

    text = read_text(Path(name), _HINT)
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: the YAML contains an impossible date or number
        raise _bad(f"{name} is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise _bad(f"the YAML of {name} has too many levels of lists and tables") from None
    configs = _configs(name, data)
    chosen = _chosen(name, configs, config)
    return chosen, tuple(_entry(f"{name}: {chosen}[{i}]", raw) for i, raw in enumerate(configs[chosen]))


def _configs(name: str, data: Any) -> Mapping[str, list[Any]]:  # noqa: ANN401
    if not isinstance(data, dict) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, dict) else None
        raise _bad(f"{name}: version is {version!r}, and vgpuctl reads only version {VERSION!r}")
    configs = data.get("mig-configs")
    if not isinstance(configs, dict) or not configs:
        raise _bad(f"{name} has no mig-configs")
    for key, entries in configs.items():
        if not str(key).isprintable():
            raise _bad(f"{name}: {str(key)!r} is not a valid name of a configuration")
        if not isinstance(entries, list) or not entries:
            raise _bad(f"{name}: {key} is not a list of entries")
    return {str(key): entries for key, entries in configs.items()}


def _chosen(name: str, configs: Mapping[str, Any], config: str | None) -> str:
    if config is None and len(configs) == 1:
        return next(iter(configs))
    if config is None or config not in configs:
        asked = "none is named" if config is None else f"there is no {config!r}"
        names = ", ".join(list(configs)[:12]) + (" and more" if len(configs) > 12 else "")
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{name} has {counted(len(configs), 'configuration')} and {asked}",
            f"--config takes one of {names}",
        )
    return config


def _entry(where: str, raw: Any) -> Entry:  # noqa: ANN401
    if not isinstance(raw, dict):
        raise _bad(f"{where} is not a table")
    unknown = sorted(str(key) for key in raw.keys() - _ENTRY_KEYS)
    if unknown:
        raise _bad(f"{where} has the unknown key {unknown[0]!r}")
    if not isinstance(raw.get("mig-enabled"), bool):
        raise _bad(f"{where}: mig-enabled is {raw.get('mig-enabled')!r}, not true or false")
    wanted = raw.get("mig-devices") or {}
    if not raw["mig-enabled"] and wanted:
        raise _bad(f"{where}: mig-devices is set, although mig-enabled is false")
    layout = _layout(where, wanted) if raw["mig-enabled"] else (OFF,)
    return Entry(_indices(where, raw.get("devices")), _pci_ids(where, raw.get("device-filter")), layout)


def _layout(where: str, wanted: Any) -> tuple[str, ...]:  # noqa: ANN401
    if not isinstance(wanted, dict):
        raise _bad(f"{where}: mig-devices is not a table of profiles and numbers")
    words = []
    for profile, count in wanted.items():
        if type(count) is not int or not 0 <= count < 100:
            raise _bad(f"{where}: {count!r} of {profile!r} is not a number of instances")
        if count:
            words.append(f"{profile}*{count}")
    return tuple(words) or (NONE,)


def _indices(where: str, devices: Any) -> frozenset[int] | None:  # noqa: ANN401
    if devices == "all":
        return None
    if isinstance(devices, list) and all(type(index) is int and index >= 0 for index in devices):
        return frozenset(devices)
    raise _bad(f"{where}: devices is {devices!r}, neither all nor a list of indices")


def _pci_ids(where: str, given: Any) -> frozenset[int] | None:  # noqa: ANN401
    if given is None:
        return None
    texts = given if isinstance(given, list) else [given]
    try:
        return frozenset(int(str(text), 16) for text in texts)
    except ValueError:
        raise _bad(f"{where}: device-filter {given!r} is not made of PCI ids such as 0x233510DE") from None


def layouts(entries: Sequence[Entry], devices: Iterable[pb.MigDevice]) -> dict[str, tuple[str, ...]]:
    """The desired layout of each device, by UUID; a device that no entry selects is left out."""
    found: dict[str, tuple[str, ...]] = {}
    for device in devices:
        for entry in entries:
            if entry.covers(device):
                found[device.device_uuid] = entry.layout
    return found


def written(devices: Iterable[pb.MigDevice], config: str) -> dict[str, Any]:
    """The current instances of the devices, as a mig-parted file with one configuration. The format has no
    placements.

    Compute instances have separate names (mig-parted, pkg/types/mig_profile.go). mig-parted puts them into
    one GPU instance as long as they fit.
    """
    groups: dict[tuple[tuple[str, int], ...] | None, list[int]] = {}
    for device in devices:
        names = Counter(i.profile_name for i in device.instances if i.HasField("gpu_instance_id"))
        groups.setdefault(tuple(sorted(names.items())) if device.current else None, []).append(
            device.device_index
        )
    entries: list[dict[str, Any]] = []
    for held, indices in groups.items():
        entry: dict[str, Any] = {"devices": indices, "mig-enabled": held is not None}
        entries.append(entry | ({} if held is None else {"mig-devices": dict(held)}))
    return {"version": VERSION, "mig-configs": {config: entries}}


def _bad(sentence: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, _HINT)
