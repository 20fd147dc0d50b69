"""Chooses the daemon's socket for a call, and explains why a socket cannot be used."""

import os
from pathlib import Path

from vgpud.api.doors import SOCKET_NAMES
from vgpud.model.caller import Door
from vgpud.model.errors import ErrorCode, VgpuError

SYSTEMD = Path("/run/systemd/system")


def usable_socket(named: Path | None, door: Door) -> Path:
    """Returns `named`, or else the socket of `choose_socket`. Raises VgpuError: UNREACHABLE, NOT_ALLOWED."""
    socket = named or choose_socket(door)
    if not _exists(socket, door):
        raise unreachable(socket, "there is no such socket")
    if not os.access(socket, os.R_OK | os.W_OK):
        raise _closed(socket, door)
    return socket


def choose_socket(door: Door) -> Path:
    """Chooses the socket for a call that needs `door`.

    VGPUD_SOCKET is used if it is set. Otherwise it is a socket in VGPUD_RUN_DIR (/run/vgpud): admin.sock for
    root; for other users vgpud.sock, or ro.sock if `door` is READ and the process may not open vgpud.sock.
    """
    named = os.environ.get("VGPUD_SOCKET")
    if named:
        return Path(named)
    folder = Path(os.environ.get("VGPUD_RUN_DIR") or "/run/vgpud")
    if os.geteuid() == 0:
        return folder / SOCKET_NAMES[Door.ADMIN]
    tenant = folder / SOCKET_NAMES[Door.TENANT]
    if door is Door.READ and not os.access(tenant, os.R_OK | os.W_OK):
        return folder / SOCKET_NAMES[Door.READ]
    return tenant


def service(verb: str) -> str:
    """The command for vgpud's unit; empty where systemd does not run (sd_booted(3))."""
    return f"systemctl {verb} vgpud" if SYSTEMD.is_dir() else ""


def unreachable(socket: Path, why: str) -> VgpuError:
    """The error for a daemon that does not answer at `socket`."""
    return VgpuError(
        ErrorCode.UNREACHABLE,
        f"vgpud does not answer at {socket}: {why}",
        f"see if it runs: {service('status') or 'pgrep -a vgpud'}; VGPUD_SOCKET names another socket",
    )


def _closed(socket: Path, door: Door) -> VgpuError:
    hint = "join its group (usermod -aG vgpu USER, then log in again), or call as root"
    return VgpuError(
        ErrorCode.NOT_ALLOWED,
        f"uid {os.geteuid()} may not open {socket}",
        "call as root" if door is Door.ADMIN else hint,
    )


def _exists(socket: Path, door: Door) -> bool:
    try:
        return socket.exists()
    except PermissionError:
        raise _closed(socket, door) from None
