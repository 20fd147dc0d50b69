"""Turns a TOML profile into the flat `key=value` description that `vgpu-simctl create` reads.

The flat keys are the names of the fields in native/sim/state/fields.h. vgpu-simctl refuses a key that it does
not know, so a difference between the two shows at once.
"""

from __future__ import annotations

import hashlib
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: The keys of a card that are passed on unchanged, each with its default.
CARD_DEFAULTS: Mapping[str, int | float | str] = {
    "brand": 14, "architecture": 0, "sm_count": 0, "core_count": 0, "memory_total": 0,
    "memory_reserved": 0, "memory_bus_width_bits": 256, "bar1_total": 268435456, "vbios": "N/A",
    "board_part": "N/A", "gpu_part": "N/A", "inforom_image": "N/A", "pci_device_id": 0,
    "pci_subsystem_id": 0, "pcie_generation": 4, "pcie_width": 16, "virtualization_mode": 0,
    "ecc": 0, "persistence": 0, "nvlink_count": 0, "nvlink_version": 0, "power_limit_mw": 70000,
    "power_min_mw": 60000, "power_max_mw": 70000, "power_idle_mw": 10000, "temperature_c": 30,
    "temperature_shutdown_c": 93, "temperature_slowdown_c": 90, "temperature_max_c": 85,
    "clock_idle_mhz": 210, "clock_graphics_mhz": 1410, "clock_memory_mhz": 1215,
    "clock_video_mhz": 1275, "l2_cache_bytes": 4194304, "multi_processor_threads": 2048,
    "shared_memory_per_sm_bytes": 65536, "shared_memory_optin_bytes": 65536, "async_engines": 3,
    "context_bytes": 551550976, "context_mps_bytes": 364904448,
    "green_context_bytes": 6291456, "kernel_us": 10.0, "timeslice_us": 2000.0,
    "context_switch_us": 120.9, "channels_stop_us": 250.0, "channels_off_us": 449.0,
    "channels_on_us": 275.0, "numa_node_reported": 0,
}  # fmt: skip
#: Drivers that a node can be made with: branch -> version, NVML version, CUDA version (what NVIDIA's packages
#: nvidia-compute-utils and libnvidia-compute of these branches say).
DRIVERS: Mapping[str, tuple[str, str, int]] = {
    "535": ("535.309.01", "12.535.309.01", 12020),
    "550": ("550.163.01", "12.550.163.01", 12040),
    "580": ("580.159.04", "13.580.159.04", 13000),
    "595": ("595.99.02", "13.595.99.02", 13020),
    "615": ("615.71.09", "13.615.71.09", 13040),
}
CARD_KEYS = frozenset(CARD_DEFAULTS) | {"name", "cc", "mig"}
ENGINES = {"copy": "copy_engines", "decode": "decoders", "encode": "encoders", "jpeg": "jpegs", "ofa": "ofas"}
MIG_PROFILE_KEYS = {
    "name": "name",
    "id": "id",
    "nvml": "nvml_profile",
    "slices": "slice_count",
    "count": "instance_count",
    "sm": "sm_count",
    "memory_mib": "memory_mib",
}


class ProfileError(ValueError):
    """Raised if a profile cannot be used."""


def _stable_uuid(*parts: object) -> uuid.UUID:
    digest = hashlib.sha256("/".join(str(p) for p in parts).encode()).digest()
    return uuid.UUID(bytes=digest[:16], version=4)


def _parse_pci(text: str) -> tuple[int, int, int]:
    try:
        domain, bus, rest = text.split(":")
        return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)
    except ValueError as exc:
        raise ProfileError(f"device.pci: {text!r} is not DDDDDDDD:BB:DD.F") from exc


def _mig_lines(mig: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    reset = bool(mig["needs_reset"])
    yield "mig_capable", 1
    yield "mig_needs_reset", int(reset)
    yield "mig_persists_reboot", int(mig["persists_reboot"])
    yield "memory_slices", mig["memory_slices"]
    yield "sm_per_slice", mig["sm_per_slice"]
    for index, profile in enumerate(mig["profile"]):
        for key, field in MIG_PROFILE_KEYS.items():
            yield f"gi.{index}.{field}", profile[key]
        for key, field in ENGINES.items():
            yield f"gi.{index}.{field}", profile["engines"][key]
        size = profile["size"]
        yield f"gi.{index}.placements", ",".join(f"{s}:{size}" for s in profile["starts"])


def _device_lines(
    index: int, device: Mapping[str, Any], card: Mapping[str, Any], key: str
) -> Iterator[tuple[str, object]]:
    unknown = set(card) - CARD_KEYS
    if unknown:
        raise ProfileError(f"card.{device['card']}: unknown key {sorted(unknown)[0]!r}")
    domain, bus, number = _parse_pci(device["pci"])
    yield "name", card["name"]
    yield "uuid", f"GPU-{_stable_uuid(key, index)}"
    yield (
        "serial",
        f"{int.from_bytes(hashlib.sha256(f'{key}/{index}'.encode()).digest()[:5], 'big') % 10**13:013d}",
    )
    yield "minor", device.get("minor", index)
    yield "pci_domain", domain
    yield "pci_bus", bus
    yield "pci_device", number
    yield "board_id", (bus << 8) | number
    yield "module_id", index + 1
    yield "numa_node", device.get("numa", 0)
    yield "cc_major", card["cc"][0]
    yield "cc_minor", card["cc"][1]
    if card.get("timeslice_us", 1) < 1 or card.get("context_switch_us", 0) < 0:
        raise ProfileError(f"card.{device['card']}: a time slice is at least 1 us, a switch at least 0")
    for field, default in CARD_DEFAULTS.items():
        yield field, card.get(field, default)
    if "mig" in card:
        yield from _mig_lines(card["mig"])


def _topology_lines(profile: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    devices, topology = profile["device"], profile.get("topology", {})
    links = topology.get("nvlink_all_to_all", 0)
    for a, first in enumerate(devices):
        for b, second in enumerate(devices):
            if a == b:
                continue
            same = first.get("numa", 0) == second.get("numa", 0)
            yield f"link.{a}.{b}", links if first["card"] == second["card"] else 0
            yield f"topology.{a}.{b}", topology.get("same_numa" if same else "other_numa", 50)


def flatten(profile: Mapping[str, Any], seed: str = "") -> str:
    """Returns the description of the whole node as text. `seed` changes every UUID and serial number.

    Raises ProfileError for a profile of another version, a missing or unknown key, and a wrong value.
    """
    if profile.get("version") != 1:
        raise ProfileError(f"version: {profile.get('version')!r} is not 1")
    try:
        lines: list[tuple[str, object]] = [
            ("profile", profile["name"]),
            ("driver_version", profile["driver"]["version"]),
            ("nvml_version", profile["driver"]["nvml"]),
            ("cuda_version", profile["driver"]["cuda"]),
            ("device_count", len(profile["device"])),
            ("caps_minor_base", 3),
        ]
        for index, device in enumerate(profile["device"]):
            if device["card"] not in profile["card"]:
                raise ProfileError(f"device {index}: no card {device['card']!r} in this profile")
            card = profile["card"][device["card"]]
            key = f"{profile['name']}/{seed}"
            lines += [(f"device.{index}.{k}", v) for k, v in _device_lines(index, device, card, key)]
        lines += list(_topology_lines(profile))
    except KeyError as exc:
        raise ProfileError(f"key {exc.args[0]!r} is missing") from exc
    return "".join(f"{key}={value}\n" for key, value in lines)


def with_driver(profile: dict[str, Any], branch: str) -> dict[str, Any]:
    """Returns the profile with the driver of `branch`, or unchanged if `branch` is empty. Raises
    ProfileError if there is no driver of the branch.
    """
    if not branch:
        return profile
    if branch not in DRIVERS:
        raise ProfileError(f"no driver {branch!r}; there are: {', '.join(DRIVERS)}")
    return profile | {"driver": dict(zip(("version", "nvml", "cuda"), DRIVERS[branch], strict=True))}


def find(name: str, directories: list[Path]) -> Path:
    """Returns the file of a profile that is given by name or by path; a path is not checked. Raises
    ProfileError if no profile has the name.
    """
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    for directory in directories:
        path = directory / f"{name}.toml"
        if path.is_file():
            return path
    known = sorted(p.stem for d in directories for p in d.glob("*.toml"))
    raise ProfileError(f"no profile {name!r}; there are: {', '.join(known)}")


def load(name: str, directories: list[Path]) -> dict[str, Any]:
    """Reads a profile. A profile with the single key `same_as` is another name of the profile that the key
    names.

    Raises ProfileError if the profile is missing, cannot be read, or is not TOML in UTF-8.
    """
    path = find(name, directories)
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ProfileError(f"{path}: {exc}") from exc
    return load(found["same_as"], directories) if found.keys() == {"same_as"} else found
