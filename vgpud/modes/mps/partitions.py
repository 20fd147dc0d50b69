"""Static SM partitions: each tenant has multiprocessors of its own, in whole chunks of the device.

NVIDIA's daemon forgets its partitions when it ends, and chooses their ids (MPS guide, "Legacy MPS v2
Interface"). So vgpud makes them again, and writes the name of a tenant's partition to its file
`partition`, from which the guard gives it to each process (native/guard/admission.c). A process that names no
partition gets no CUDA. This was not run on a card.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import WHOLE, Percent
from vgpud.modes.mps.control import MpsControl

_FILE = "partition"


def chunks_of(share: Percent, chunks: int) -> int:
    """The whole chunks in a share of a device. Shares that add up to a device never need more than it has."""
    return share.hundredths * chunks // WHOLE.hundredths


def settle(control: MpsControl, device_uuid: str, shares: Mapping[Path, Percent]) -> None:
    """Makes the partitions of these tenants that are missing, and removes all others that no client uses.
    `shares` has the tenants' folders. Raises VgpuError.
    """
    found = control.partitions()
    names = {folder: _read(folder) for folder in shares if folder.is_dir()}
    kept = {folder: one for folder, name in names.items() for one in found.ids if name.startswith(one)}
    for identity in found.ids - set(kept.values()):
        control.remove_partition(device_uuid, identity)
    for folder in names.keys() - kept.keys():
        chunks = chunks_of(shares[folder], found.chunks)
        if chunks == 0:
            raise VgpuError(
                ErrorCode.UNSUPPORTED,
                f"a share of {shares[folder].value:g} % is less than one of the {found.chunks} chunks of the "
                "device",
                f"ask for a share of at least {100 / found.chunks:.3g} %",
            )
        _write(folder, control.add_partition(device_uuid, chunks))


def forget(folders: Iterable[Path]) -> None:
    """Forgets the names that an ended daemon gave, because another daemon may give them again."""
    for folder in folders:
        (folder / _FILE).unlink(missing_ok=True)


def _read(folder: Path) -> str:
    """The id of the tenant's partition: the part of the recorded name after the device. Empty if no name is
    recorded.
    """
    try:
        return (folder / _FILE).read_text().strip().partition("/")[2]
    except OSError:
        return ""


def _write(folder: Path, name: str) -> None:
    fresh = folder / f"{_FILE}.new"
    try:
        fresh.write_text(f"{name}\n")
        fresh.chmod(0o644)
        fresh.replace(folder / _FILE)
    except OSError as error:
        raise VgpuError(
            ErrorCode.HELPER_FAILED,
            f"{folder / _FILE} cannot be written: {(error.strerror or str(error)).lower()}",
            "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
        ) from None
