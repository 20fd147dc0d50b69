"""The folders through which a device's control daemon and its tenants communicate.

    RUN/mps/DEVICE           for root, and by an ACL for the uids that hold a share of the device
    RUN/mps/DEVICE/pipe/gN   one life of the daemon: its sockets, for root only until the limits are set
    RUN/mps/DEVICE/pipe/p    -> gN while clients may connect; tenants know this name only
    RUN/mps/DEVICE/log
    RUN/mps/t/ALLOCATION     what the guard in a tenant's processes reads: `limits`, locked by each process

Containers have `pipe` mounted, so the ACL of the folder above it does not keep them out, whatever their uids.
Until the limits are in force, `p` does not lead to the daemon, and no client can reach it, not even root's.
The stale sockets and pid file of a daemon that was killed lie in a folder that is never used again.
"""

import hashlib
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from vgpud.lease import ANYONE_FOLDER, remove_lease
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MIB, WHOLE
from vgpud.model.tenancy import ANYONE, Slice
from vgpud.modes.mps.rules import MpsRules

# maximum length of a folder's path: the path of a socket in it has at most 107 bytes (unix(7)), and the
# longest name of a socket takes a part of them
_MAX_PATH_BYTES = 107 - len("/control_privileged")
_ACL = "system.posix_acl_access"


@dataclass(frozen=True, slots=True)
class DeviceFolder:
    """The folders of one device; `path` is short, because the pipes are Unix sockets."""

    path: Path

    @classmethod
    def of(cls, run_dir: Path, device_uuid: str) -> "DeviceFolder":
        return cls(run_dir / "mps" / hashlib.sha256(device_uuid.encode()).hexdigest()[:12])

    @property
    def pipes(self) -> Path:
        return self.path / "pipe"

    @property
    def pipe(self) -> Path:
        """The folder with the sockets to which tenants connect."""
        return self.pipes / "p"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def life(self, number: int) -> Path:
        return self.pipes / f"g{number}"

    def lives(self) -> tuple[int, ...]:
        """The numbers of the daemon's folders, newest first. Each start of the daemon has one folder."""
        if not self.pipes.is_dir():
            return ()
        names = (entry.name for entry in self.pipes.glob("g*"))
        return tuple(sorted((int(name[1:]) for name in names if name[1:].isdigit()), reverse=True))

    def prepare(self) -> Path:
        """Makes the folder for the daemon's next start, closed to tenants. Precondition: no daemon runs.

        Raises VgpuError(HELPER_FAILED).
        """
        number = next(iter(self.lives()), 0) + 1
        folder = self.life(number)
        if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"the MPS pipe folder {folder} is longer than {_MAX_PATH_BYTES} bytes",
                "set VGPUD_RUN_DIR to a shorter path",
            )
        try:
            self.close()
            _make(self.path.parent, 0o711)
            _make(self.path, 0o700)
            _make(self.pipes, 0o755)
            _make(self.log, 0o700)
            _make(folder, 0o700)
            for old in self.lives()[1:]:
                shutil.rmtree(self.life(old), ignore_errors=True)
        except OSError as error:
            raise _failed(folder, error) from None
        return folder

    def admit(self, uids: frozenset[int]) -> None:
        """Lets only root and these users reach `pipe` by its path. Idempotent.

        Raises VgpuError(HELPER_FAILED) if the file system has no ACLs.
        """
        if not self.path.is_dir():
            return
        try:
            os.setxattr(self.path, _ACL, _acl(uids))
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self.path} cannot be restricted to its tenants: {(error.strerror or str(error)).lower()}",
                "set VGPUD_RUN_DIR to a file system with ACLs, such as tmpfs",
            ) from None

    def open(self, life: Path) -> None:
        """Lets clients connect to the daemon: creates the link `p` to its folder atomically."""
        fresh = self.pipes / "p.new"
        try:
            life.chmod(0o755)
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(life.name)
            fresh.replace(self.pipe)
        except OSError as error:
            raise _failed(self.pipe, error) from None

    def is_open_on(self, life: Path) -> bool:
        return self.pipe.is_symlink() and self.pipe.readlink() == Path(life.name)

    def close(self) -> None:
        """Removes the link `p`. New clients cannot connect; connected clients stay."""
        if self.pipe.is_dir() and not self.pipe.is_symlink():
            shutil.rmtree(self.pipe, ignore_errors=True)
        self.pipe.unlink(missing_ok=True)

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.pipes, ignore_errors=True)


def tenant_folder(run_dir: Path, allocation_id: str) -> Path:
    return run_dir / "mps" / "t" / allocation_id


def inner_folder(folder: Path, uid: int) -> Path:
    """The part of a tenant's folder that the tenant sees: for ANYONE a folder in `folder`, which users of the
    host cannot reach.
    """
    return folder / ANYONE_FOLDER if uid == ANYONE else folder


def write_tenant(folder: Path, part: Slice, rules: MpsRules, uid: int) -> Path:
    """Writes the file `limits` for native/guard/admission.c. Returns its folder, `inner_folder`. The tenant
    can write no file there, so it cannot fill the run folder. Only the tenant and root can reach the file,
    because the tenant's processes set locks on it.

    Raises VgpuError(HELPER_FAILED).
    """
    share = (part.share or WHOLE).hundredths
    inner = inner_folder(folder, uid)
    try:
        for parent in (folder.parent.parent, folder.parent):
            _make(parent, 0o711)
        _make(folder, 0o700)
        if uid == ANYONE:
            _make(inner, 0o711)
        else:
            os.setxattr(folder, _ACL, _acl(frozenset((uid,))))
        fresh = inner / "limits.new"
        words = (share, part.memory_bytes // MIB, rules.processes_per_tenant, int(rules.pooled_memory))
        fresh.write_text(" ".join(map(str, words)) + "\n")
        fresh.chmod(0o644)
        fresh.replace(inner / "limits")
    except OSError as error:
        raise _failed(folder, error) from None
    return inner


async def remove_tenant(folder: Path) -> None:
    """Removes a tenant's files for the guard. The guard then refuses processes that start in the allocation's
    environment. Raises VgpuError(LEASE_FAILED).
    """
    await remove_lease(folder.parent, folder.name)


def _acl(uids: frozenset[int]) -> bytes:
    """The ACL of a folder: the owner may do everything, these users may search, others nothing
    (linux/posix_acl_xattr.h, version 2).
    """
    nobody, search, everything = 0, 1, 7
    owner, user, group, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20  # tags of linux/posix_acl.h
    no_id = 0xFFFFFFFF
    entries = [
        (owner, everything, no_id),
        *((user, search, uid) for uid in sorted(uids)),
        (group, nobody, no_id),
        (mask, search, no_id),
        (other, nobody, no_id),
    ]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def _make(folder: Path, mode: int) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    folder.chmod(mode)


def _failed(path: Path, error: OSError) -> VgpuError:
    return VgpuError(
        ErrorCode.HELPER_FAILED,
        f"{path} cannot be made ready for MPS: {(error.strerror or str(error)).lower()}",
        "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
    )
