"""Records a device's MIG state: the instances that vgpud made, and the applied layout.

An instance is recorded before it is made, and its record is deleted after it is destroyed. The ledger has a
row for each GPU instance and each compute instance that vgpud made, and one for the layout of a device.
"""

from dataclasses import dataclass

from vgpud.model.device import PlaceKey, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.rows import Rows

Key = PlaceKey
Part = tuple[Key, Key]  # The keys of a GPU instance, and of one of its compute instances.

_OFF = "off"
_SHOWN_CHARACTERS = 40


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

    A row of `instances` has the device's UUID, the GPU instance, and a compute instance or "". A row of
    `layouts` has the device's UUID and the layout.
    """

    def __init__(self, instances: Rows, layouts: Rows) -> None:
        self._instances = instances
        self._layouts = layouts

    @property
    def revision(self) -> int:
        return self._instances.changes + self._layouts.changes

    def own(self, device_uuid: str) -> frozenset[Key]:
        """The GPU instances that vgpud made, or was creating when it was interrupted."""
        rows = self._instances
        return frozenset(_read(gpu) for uuid, gpu, part in rows if uuid == device_uuid and not part)

    async def made(self, device_uuid: str, key: Key) -> None:
        await self._instances.put((device_uuid, _write(key), ""))

    async def gone(self, device_uuid: str, key: Key) -> None:
        await self._instances.drop(device_uuid, _write(key), "")

    def own_parts(self, device_uuid: str) -> frozenset[Part]:
        """The compute instances, each a part of a GPU instance, that vgpud made or was creating when it was
        interrupted.
        """
        rows = self._instances
        return frozenset(
            (_read(gpu), _read(part)) for uuid, gpu, part in rows if uuid == device_uuid and part
        )

    async def part_made(self, device_uuid: str, part: Part) -> None:
        await self._instances.put((device_uuid, *map(_write, part)))

    async def part_gone(self, device_uuid: str, part: Part) -> None:
        await self._instances.drop(device_uuid, *map(_write, part))

    def applied(self, device_uuid: str) -> Applied | None:
        row = self._layouts.get(device_uuid)
        if row is None:
            return None
        if row[-1] == _OFF:
            return Applied(off=True)
        words = row[-1].split()
        return Applied(
            instances=frozenset(_read(word) for word in words if "/" not in word),
            computes=frozenset(_read_part(word) for word in words if "/" in word),
        )

    async def apply(self, device_uuid: str, layout: Applied | None) -> None:
        """Records a layout in place of the one before; None deletes it."""
        if layout is None:
            await self._layouts.drop(device_uuid)
        else:
            await self._layouts.put((device_uuid, _text(layout)))


def _text(layout: Applied) -> str:
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
    try:
        profile, start, size = map(int, text.replace("@", ":").split(":"))
    except ValueError:
        raise VgpuError(
            ErrorCode.LEDGER_CORRUPT,
            f"the ledger names a MIG instance {text[:_SHOWN_CHARACTERS]!r}, which is no profile@start:size",
            "restore the state directory from a backup",
        ) from None
    return profile, Placement(start, size)
