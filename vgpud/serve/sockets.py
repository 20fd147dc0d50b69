"""The public sockets: vgpud creates them with their mode and group, or systemd passes them."""

import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vgpud.api.doors import SOCKET_NAMES
from vgpud.model.caller import Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.untrusted import Untrusted, refuse_descriptors

_MODES: dict[Door, int] = {Door.READ: 0o666, Door.TENANT: 0o660, Door.ADMIN: 0o600}
# Names of the sockets that systemd passes: FileDescriptorName= of the socket units.
_DESCRIPTOR_NAMES: dict[Door, str] = {Door.READ: "ro", Door.TENANT: "tenant", Door.ADMIN: "admin"}
_RUNTIME_DESCRIPTOR = "runtime"
_PASSED_NAMES = (*_DESCRIPTOR_NAMES.values(), _RUNTIME_DESCRIPTOR)
_RUNTIME_NAME = "runtime.sock"
_FIRST_PASSED = 3  # first passed descriptor: SD_LISTEN_FDS_START of sd_listen_fds(3)
_PATH_BYTES = 107  # maximum length of a socket's path: sun_path of unix(7), minus its final zero
_BACKLOG = 1024


def private_folder(run_dir: Path) -> Path:
    """The folder in `run_dir` that only this user may enter; creates it if it is missing.

    Raises VgpuError(BAD_SETTING) if it has another owner, or cannot be created.
    """
    folder = run_dir / "private"
    try:
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"cannot make {folder}: {error.strerror}",
            "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"{folder} is not a folder of uid {os.geteuid()}",
            "remove it, or set VGPUD_RUN_DIR to a folder that only root can write to",
        )
    folder.chmod(0o700)
    return folder


def claim(run_dir: Path) -> int:
    """Locks `run_dir` against other daemons, which would take its leases for orphans. Returns the descriptor
    of the lock.

    Raises VgpuError(BAD_SETTING) if another daemon has the lock, or if the folder cannot be created or
    locked.
    """
    path = private_folder(run_dir) / "lock"
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"another daemon runs in {run_dir}",
            "stop it first, or set VGPUD_RUN_DIR to another folder",
        ) from None
    except OSError as error:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"cannot lock {path}: {error.strerror}",
            "check the rights and free space of the run folder (VGPUD_RUN_DIR)",
        ) from None
    return held


@dataclass(frozen=True, slots=True)
class PublicSockets:
    """The listening sockets. `made`: vgpud created the files in `run_dir` and removes them at the end."""

    run_dir: Path
    listening: Mapping[Door, socket.socket]
    made: bool

    def close(self) -> None:
        if self.made:
            for door in self.listening:
                (self.run_dir / SOCKET_NAMES[door]).unlink(missing_ok=True)
        for one in self.listening.values():
            one.close()


def public_sockets(run_dir: Path, group: str, passed: Mapping[str, socket.socket]) -> PublicSockets:
    """Returns the sockets that systemd passed, or else creates them. Raises VgpuError(BAD_SETTING)."""
    listening = {door: passed[name] for door, name in _DESCRIPTOR_NAMES.items() if name in passed}
    made = not listening
    if made:
        listening = _open_sockets(run_dir, group)
    return PublicSockets(run_dir, listening, made)


def _open_sockets(run_dir: Path, group: str) -> dict[Door, socket.socket]:
    """Listens on ro.sock, vgpud.sock (for `group`; "" leaves the group as it is) and admin.sock.

    Each is created in the private folder, and moved into place when its mode and group are set. There it
    replaces the socket of a daemon that was killed.
    """
    folder = private_folder(run_dir)
    gid = _gid(group)
    opened: dict[Door, socket.socket] = {}
    try:
        for door in Door:
            group_of = gid if door is Door.TENANT else -1
            opened[door] = _listen(folder, run_dir / SOCKET_NAMES[door], _MODES[door], group_of)
    except BaseException:
        for made in opened.values():
            made.close()
        raise
    return opened


@dataclass(frozen=True, slots=True)
class RuntimeSocket:
    """The socket for container runtimes at `path`. `made`: vgpud created it and removes it; otherwise systemd
    owns it.
    """

    listening: socket.socket
    path: Path
    made: bool

    def open_to_group(self, opened: bool) -> None:
        """Lets users of the socket's group connect, or root only."""
        with suppress(OSError):  # the socket's file was removed, so no caller can connect
            self.path.chmod(_MODES[Door.TENANT if opened else Door.ADMIN])

    def close(self) -> None:
        if self.made:
            self.path.unlink(missing_ok=True)
        self.listening.close()


def runtime_socket(run_dir: Path, group: str, passed: Mapping[str, socket.socket]) -> RuntimeSocket:
    """Returns runtime.sock, for container runtimes of root: passed by systemd, or created. It belongs to
    `group`, and `open_to_group` opens it to the group's users.

    Raises VgpuError(BAD_SETTING). A socket file that an earlier daemon left is replaced.
    """
    if _RUNTIME_DESCRIPTOR in passed:
        listening = passed[_RUNTIME_DESCRIPTOR]
        return RuntimeSocket(listening, Path(os.fsdecode(listening.getsockname())), False)
    path = run_dir / _RUNTIME_NAME
    made = _listen(private_folder(run_dir), path, _MODES[Door.ADMIN], _gid(group), takes_descriptors=True)
    return RuntimeSocket(made, path, True)


def _listen(folder: Path, path: Path, mode: int, gid: int, takes_descriptors: bool = False) -> socket.socket:
    hidden = folder / path.name
    check_length(hidden)
    hidden.unlink(missing_ok=True)
    made = Untrusted(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not takes_descriptors:
            refuse_descriptors(made)  # before a caller can connect
        made.bind(str(hidden))
        hidden.chmod(mode)
        if gid >= 0:
            os.chown(hidden, -1, gid)
        made.listen(_BACKLOG)
        made.setblocking(False)
        made.keep()
        hidden.rename(path)
    except OSError as error:
        made.close()
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"cannot listen on {path}: {error.strerror}",
            "check the rights and free space of the run folder (VGPUD_RUN_DIR), or run vgpud as root",
        ) from None
    return made


def check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _PATH_BYTES:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"{path} has {length} bytes, a Unix socket's path at most {_PATH_BYTES}",
            "set VGPUD_RUN_DIR to a shorter path",
        )


def _gid(group: str) -> int:
    if not group:
        return -1
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"there is no group {group!r}",
            f"make it with groupadd --system {group}, or name another in VGPUD_GROUP",
        ) from None


def passed_sockets(environment: MutableMapping[str, str]) -> dict[str, Untrusted]:
    """The listening sockets that systemd passed (sd_listen_fds(3)), by FileDescriptorName; empty if there are
    none.

    Removes LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES from `environment`, so that no child uses them. Raises
    VgpuError(BAD_SETTING) for a repeated name, a name that is not ro, tenant, admin or runtime, or a
    descriptor that is not a listening Unix stream socket.
    """
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    named = names.split(":") if names else []
    passed: dict[str, Untrusted] = {}
    for i in range(int(count)):
        name = named[i] if i < len(named) else ""
        if name not in _PASSED_NAMES or name in passed:
            raise _badly_passed(name, f"is unknown or passed twice; known are {', '.join(_PASSED_NAMES)}")
        passed[name] = _adopt(_FIRST_PASSED + i, name)
        if name != _RUNTIME_DESCRIPTOR:
            refuse_descriptors(passed[name])
    return passed


def send_away(listening: Iterable[Untrusted]) -> None:
    """Closes the connections that wait on these listeners, at most _BACKLOG of each, and no later ones. If a
    listener needs a keeper process and none can be started, its connections go on waiting: systemd has the
    last copy of the listener.
    """
    for listener in (one for one in listening if one.keep()):
        with suppress(OSError):  # none waits, or the listener is closed
            for _ in range(_BACKLOG):
                listener.accept()[0].close()


def _adopt(descriptor: int, name: str) -> Untrusted:
    fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        adopted = Untrusted(fileno=descriptor)
        listens = adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        raise _badly_passed(name, "is not a socket") from None
    if not listens or adopted.family is not socket.AF_UNIX or adopted.type is not socket.SOCK_STREAM:
        raise _badly_passed(name, "is not a listening Unix stream socket")
    adopted.setblocking(False)
    return adopted


def _badly_passed(name: str, why: str) -> VgpuError:
    return VgpuError(
        ErrorCode.BAD_SETTING,
        f"the socket {name!r} that systemd passed {why}",
        "see ListenStream= and FileDescriptorName= in vgpud.socket",
    )
