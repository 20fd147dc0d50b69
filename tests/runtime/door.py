"""A fake runtime.sock that records the requests of vgpu-runtime and vgpu-hook and sends prepared answers."""

import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from vgpud.serve.runtime_wire import MAGIC, REPLY, REQUEST, Status


@dataclass
class Heard:
    verb: int
    flags: int
    id: str
    body: bytes
    pidfd_links: list[str]


@dataclass
class FakeDoor:
    """`answers` are sent in order, the last one again and again. For None the connection is closed
    instead.
    """

    run_dir: Path
    answers: list[tuple[Status, bytes] | None]
    heard: list[Heard] = field(default_factory=list)

    def __enter__(self) -> "FakeDoor":
        self.run_dir.mkdir(exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.run_dir / "runtime.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        (self.run_dir / "runtime.sock").unlink()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(300)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        head, descriptors, _, _ = socket.recv_fds(connection, REQUEST.size, 4)
        magic, verb, flags, id_length, body_length = REQUEST.unpack(head)
        assert magic == MAGIC
        rest = b""
        while len(rest) < id_length + body_length:
            rest += connection.recv(65536)
        links = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        self.heard.append(Heard(verb, flags, rest[:id_length].decode(), rest[id_length:], links))
        answer = self.answers[min(len(self.heard), len(self.answers)) - 1]
        if answer is not None:
            status, body = answer
            connection.sendall(REPLY.pack(MAGIC, status, len(body)) + body)
