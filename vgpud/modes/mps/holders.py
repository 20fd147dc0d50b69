"""Who keeps a control daemon from answering.

NVIDIA's daemon reads from one connection at a time and waits for it: a process that connects and says
nothing stops it for everybody (measured on 535 and 550). To end the daemon would end all its clients,
so the one that holds it is looked for: the descriptor that the daemon waits on (/proc/PID/syscall), the
socket behind it, that socket's peer (sock_diag(7)), and who has that open (/proc/PID/fd).
"""

import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# asm/unistd.h of x86-64 and asm-generic/unistd.h (aarch64): read, recvfrom, recvmsg
_READING = frozenset({0, 45, 47, 63, 207, 212})
_NETLINK_SOCK_DIAG = 4  # linux/netlink.h
_SOCK_DIAG_BY_FAMILY = 20  # linux/sock_diag.h
_NLM_F_REQUEST_DUMP = 0x301  # linux/netlink.h: NLM_F_REQUEST | NLM_F_DUMP
_NLMSG_DONE, _NLMSG_ERROR = 3, 2
_UDIAG_SHOW_PEER = 0x4  # linux/unix_diag.h
_UNIX_DIAG_PEER = 2
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")


def holders(daemon_pid: int) -> tuple[int, ...]:
    """Processes at the other end of the connection that the daemon waits on; none if it does not wait so."""
    inode = _waits_on(daemon_pid)
    peer = None if inode is None else unix_peers().get(inode)
    if not peer:
        return ()
    return tuple(pid for pid in _processes() if pid != daemon_pid and peer in _sockets_of(pid))


def _waits_on(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
        if len(words) < 2 or int(words[0]) not in _READING:
            return None
        return _inode(Path(f"/proc/{pid}/fd/{int(words[1], 16)}"))
    except (OSError, ValueError):
        return None


def unix_peers() -> dict[int, int]:
    """The peer's inode of each connected Unix socket of this network namespace, by its own inode.

    Empty where the kernel will not say.
    """
    peers: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            # struct nlmsghdr, struct unix_diag_req: family, protocol, pad, states, inode, show, cookie
            body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0, 0)
            head = struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
            link.settimeout(2.0)
            link.send(head + body)
            while _read_dump(link.recv(1 << 16), peers):
                continue
    except OSError:
        return {}
    return peers


def _read_dump(data: bytes, peers: dict[int, int]) -> bool:
    """False at the end of the dump. Layouts: struct nlmsghdr, struct unix_diag_msg, struct rtattr."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
            return False
        inode = struct.unpack_from("=I", data, at + 20)[0]
        attribute = at + 32
        while attribute + 4 <= at + length:
            size, name = struct.unpack_from("=HH", data, attribute)
            if name == _UNIX_DIAG_PEER and size >= 8:
                peers[inode] = struct.unpack_from("=I", data, attribute + 4)[0]
            attribute += max((size + 3) & ~3, 4)
        at += (length + 3) & ~3
    return True


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _sockets_of(pid: int) -> set[int | None]:
    try:
        return {_inode(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()


def _inode(link: Path) -> int | None:
    try:
        match = _SOCKET.fullmatch(str(link.readlink()))
    except OSError:
        return None
    return int(match.group(1)) if match else None
