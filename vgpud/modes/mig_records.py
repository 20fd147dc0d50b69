"""Records a device's MIG state: the instances that vgpud made, and the applied layout.

The records are stored with the original settings, because a restore undoes both: it removes the instances and
the layout. A record is durable before the change that it describes.
"""

from dataclasses import dataclass

from vgpud.model.device import PlaceKey, Placement
from vgpud.modes.base import Originals

Key = PlaceKey
Part = tuple[Key, Key]  # The keys of a GPU instance, and of one of its compute instances.

_INSTANCE = "mig_instance "
_PART = "mig_compute_instance "
_LAYOUT = "mig_layout "
_ABSENT = "absent"
_OFF = "off"
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Applied:
    """A layout that an administrator applied. `off` means that MIG mode is to be off.

    `computes` are the compute instances into which the layout's GPU instances are divided.
    """

    off: bool = False
    instances: frozenset[Key] = frozenset()
    computes: frozenset[Part] = frozenset()


class MigRecords:
    """Reads and writes the records. `revision` grows with every change, so that callers can cache values
    derived from the records.
    """

    def __init__(self, originals: Originals) -> None:
        self._originals = originals
        self.revision = 0

    def own(self, device_uuid: str) -> frozenset[Key]:
        """The GPU instances that vgpud made, or was creating when it was interrupted."""
        keys = (k for k in self._originals.keys(device_uuid) if k.startswith(_INSTANCE))
        return frozenset(_read(key.removeprefix(_INSTANCE)) for key in keys)

    async def made(self, device_uuid: str, key: Key) -> None:
        self.revision += 1
        await self._originals.remember(device_uuid, _INSTANCE + _write(key), _ABSENT)

    async def gone(self, device_uuid: str, key: Key) -> None:
        self.revision += 1
        await self._originals.drop(device_uuid, _INSTANCE + _write(key))

    def own_parts(self, device_uuid: str) -> frozenset[Part]:
        """The compute instances, each a part of a GPU instance, that vgpud made or was creating when it was
        interrupted.
        """
        keys = (k for k in self._originals.keys(device_uuid) if k.startswith(_PART))
        return frozenset(_read_part(key.removeprefix(_PART)) for key in keys)

    async def part_made(self, device_uuid: str, part: Part) -> None:
        self.revision += 1
        await self._originals.remember(device_uuid, _PART + _write_part(part), _ABSENT)

    async def part_gone(self, device_uuid: str, part: Part) -> None:
        self.revision += 1
        await self._originals.drop(device_uuid, _PART + _write_part(part))

    def applied(self, device_uuid: str) -> Applied | None:
        newest = max(self._generations(device_uuid), default=None)
        text = None if newest is None else self._originals.recall(device_uuid, f"{_LAYOUT}{newest}")
        if text is None or text == _NONE:
            return None
        if text == _OFF:
            return Applied(off=True)
        words = text.split()
        return Applied(
            instances=frozenset(_read(word) for word in words if "/" not in word),
            computes=frozenset(_read_part(word) for word in words if "/" in word),
        )

    async def apply(self, device_uuid: str, layout: Applied | None) -> None:
        """Records a layout atomically. The newest generation counts; older ones are deleted after the new one
        is durable.
        """
        before = self._generations(device_uuid)
        newest = max(before, default=0) + 1
        self.revision += 1
        await self._originals.remember(device_uuid, f"{_LAYOUT}{newest}", _text(layout))
        self.revision += 1
        for old in before:
            await self._originals.drop(device_uuid, f"{_LAYOUT}{old}")
        if layout is None:
            await self._originals.drop(device_uuid, f"{_LAYOUT}{newest}")

    def _generations(self, device_uuid: str) -> list[int]:
        keys = (k for k in self._originals.keys(device_uuid) if k.startswith(_LAYOUT))
        return [int(key.removeprefix(_LAYOUT)) for key in keys]


def _text(layout: Applied | None) -> str:
    if layout is None:
        return _NONE
    if layout.off:
        return _OFF
    words = [*map(_write, sorted(layout.instances)), *map(_write_part, sorted(layout.computes))]
    return " ".join(words)


def _write_part(part: Part) -> str:
    return f"{_write(part[0])}/{_write(part[1])}"


def _read_part(text: str) -> Part:
    key, _, part = text.partition("/")
    return _read(key), _read(part)


def _write(key: Key) -> str:
    return f"{key[0]}@{key[1].start}:{key[1].size}"


def _read(text: str) -> Key:
    profile, _, place = text.partition("@")
    start, _, size = place.partition(":")
    return int(profile), Placement(int(start), int(size))
