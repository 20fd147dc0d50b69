"""A FUSE file system of an ordinary user with one file `f`, whose server may leave requests unanswered.

`python -m tests.fusefile FOLDER WORD...` mounts it on FOLDER in its own mount namespace, prints "ready", and
serves until it is ended. The kernel then ends the waiting requests. Each WORD is a request that is never
answered. When one arrives, the server prints "asked". `flush` arrives with each close(2) of the file,
`getattr` with fstat(2), `read` with the first access to the file's mapped page, `write` when the kernel
writes a page back that it kept in memory: at the latest when the file is closed.
"""

import ctypes
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: Requests and replies from include/uapi/linux/fuse.h, version 7.31.
LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 16, 18, 25, 26
INTERRUPT, BATCH_FORGET = 36, 42
WORDS = {"flush": FLUSH, "getattr": GETATTR, "read": READ, "write": WRITE}
WRITEBACK_CACHE = 1 << 16
ROOT, FILE = 1, 2
FILE_BYTES = 4096
ENOSYS = 38
CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
FOREVER = 1 << 30


def attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o666
    size = 0 if node == ROOT else FILE_BYTES
    return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def reply(kind: int, node: int, flags: int) -> tuple[int, bytes]:
    """Returns a negated errno and a body for a request of the kernel. Attributes of the file are not cached,
    so the kernel asks each time.
    """
    if kind == INIT:
        return 0, struct.pack("<4I2H2I2H8I", 7, 31, 4096, flags, 8, 8, 4096, 1, 0, 0, *(0,) * 8)
    if kind == LOOKUP:
        return 0, struct.pack("<4Q2I", FILE, 0, FOREVER, 0, 0, 0) + attributes(FILE)
    if kind == GETATTR:
        return 0, struct.pack("<Q2I", 0, 0, 0) + attributes(node)
    if kind == OPEN:
        return 0, struct.pack("<Q2I", 0, 0, 0)
    return (0, b"") if kind in (RELEASE, FLUSH) else (-ENOSYS, b"")


def serve(device: int, silent: set[int]) -> None:
    flags = WRITEBACK_CACHE if WRITE in silent else 0
    while True:
        request = os.read(device, 1 << 17)
        _, kind, unique, node = struct.unpack_from("<IIQQ", request)
        if kind in (FORGET, BATCH_FORGET, INTERRUPT) or (kind in silent and node != ROOT):
            if kind in silent:
                print("asked", flush=True)
            continue
        error, body = reply(kind, node, flags)
        os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def main() -> None:
    folder, words = sys.argv[1], sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other".encode()
    place = folder.encode()
    if (
        libc.unshare(CLONE_NEWNS) != 0
        or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0
        or libc.mount(b"tests", place, b"fuse", MS_NOSUID | MS_NODEV, options) != 0
    ):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    print("ready", flush=True)
    serve(device, {WORDS[word] for word in words})


@dataclass(frozen=True)
class FuseFile:
    path: Path  # the file's path for this process
    said: IO[str]

    def asked(self) -> bool:
        """Waits until a process waits for an unanswered request."""
        return self.said.readline() == "asked\n"


@contextmanager
def fuse_file(folder: Path, *silent: str) -> Iterator[FuseFile]:
    """Mounts a FUSE file system for the block and yields its file. Requests of the kinds in `silent` get no
    answer. The caller closes all descriptors of the file before the block ends.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "tests.fusefile", str(folder), *silent]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        yield FuseFile(Path(f"/proc/{server.pid}/root{folder}/f"), server.stdout)
    finally:
        server.kill()
        server.communicate()


# Changes the page of the FUSE file sys.argv[1], and then waits.
_WRITER = """
import os, sys
os.pwrite(os.open(sys.argv[1], os.O_RDWR), bytes(4096), 0)
os.write(1, b".")
os.read(0, 1)
"""


@contextmanager
def never_written_back(folder: Path, count: int) -> Iterator[tuple[Iterator[socket.socket], FuseFile]]:
    """Yields sockets whose last close(2) hangs until the block ends, even if the process gets a signal. Each
    socket has a descriptor of a FUSE file in its queue. The file has a page that was never written back, so
    its close waits for the file system.
    """
    with fuse_file(folder, "write") as file:
        made = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with ours:
                one = os.open(file.path, os.O_RDWR)
                socket.send_fds(ours, [b"x"], [one])
                os.close(one)
            made.append(theirs)
        # a separate process, because a child that this one starts would close its copy of the file, and wait
        words = [sys.executable, "-c", _WRITER, str(file.path)]
        writer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.read(1)
        yield iter(made), file
    writer.communicate()
    for unused in made:
        unused.close()


# Makes a system call on the file sys.argv[1], with a page of the FUSE file sys.argv[2] as its buffer.
_CALLS = """
import ctypes, mmap, os, sys
page = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 4096, mmap.MAP_PRIVATE)
buffer = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
lists = os.path.isdir(sys.argv[1])
call, flags, size = ("getdents64", os.O_RDONLY, 4096) if lists else ("write", os.O_RDWR, 1)
getattr(ctypes.CDLL(None), call)(os.open(sys.argv[1], flags), buffer, ctypes.c_size_t(size))
"""


@contextmanager
def locked_in_the_kernel(path: Path, folder: Path) -> Iterator[None]:
    """Until the block ends, a write(2) to the file at `path`, or a getdents(2) of the folder at `path`, waits
    for its buffer, which is a page of a FUSE file below `folder`. Meanwhile the kernel holds the lock of
    `path`.
    """
    with fuse_file(folder, "read") as file:
        caller = subprocess.Popen([sys.executable, "-c", _CALLS, str(path), str(file.path)])
        assert file.asked()
        yield
    caller.communicate()  # the blocked system call ends when the file system is unmounted


if __name__ == "__main__":
    main()
