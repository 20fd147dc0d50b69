"""The parts of HTTP/2 (RFC 9113) and gRPC for a test client that stops in the middle of a call."""

import socket
import struct
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, GOAWAY, RST_STREAM, WINDOW_UPDATE = 0, 1, 4, 7, 3, 8


class Peer:
    """One connection to the server. Its streams are numbered 1, 3, 5 in the order in which they are
    opened.
    """

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(300)
        self.socket.connect(str(path))
        self.socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, b""))
        self._next = 1

    def open(self, method: str, service: str = "vgpud.v1.Vgpud") -> int:
        """Sends the headers of a call without its message. Returns the number of the stream."""
        stream, self._next = self._next, self._next + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{service}/{method}",
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(_literal(name, value) for name, value in fields.items())
        self.socket.sendall(_frame(HEADERS, 0x4, stream, block))
        return stream

    def begin_message(self, stream: int, length: int, data: bytes = b"") -> None:
        """Sends the head of a message of `length` bytes, and `data` as its first bytes."""
        self.socket.sendall(_frame(DATA, 0, stream, struct.pack(">BI", 0, length) + data))

    def more(self, stream: int, data: bytes) -> None:
        self.socket.sendall(_frame(DATA, 0, stream, data))

    def end(self, stream: int) -> None:
        """Ends the client's side of the stream."""
        self.socket.sendall(_frame(DATA, 0x1, stream, b""))

    def grant(self, stream: int, count: int) -> None:
        """Allows the server to send `count` more bytes, on the stream and on the connection."""
        step = struct.pack(">I", count)
        self.socket.sendall(_frame(WINDOW_UPDATE, 0, stream, step) + _frame(WINDOW_UPDATE, 0, 0, step))

    def read_frame(self) -> tuple[int, int, int, bytes]:
        """Returns kind, flags, stream and payload. Acknowledges the server's settings."""
        kind, flags, stream, payload = self._read()
        if kind == SETTINGS and not flags & 0x1:
            self.socket.sendall(_frame(SETTINGS, 0x1, 0, b""))
        return kind, flags, stream, payload

    def ends(self) -> bool:
        """Reads until the server closes the connection. Returns false if nothing arrives for 300 s."""
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    def ended_streams(self, count: int) -> set[int]:
        """Reads until the server has ended `count` streams. Returns their numbers."""
        ended: set[int] = set()
        while len(ended) < count:
            kind, flags, stream, _ = self._read()
            if kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & 0x1):
                ended.add(stream)
        return ended

    def _read(self) -> tuple[int, int, int, bytes]:
        head = self._exactly(9)
        length = int.from_bytes(head[:3], "big")
        return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return data

    def close(self) -> None:
        self.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A literal header without indexing and with a new name (RFC 7541, 6.2.2); lengths below 127."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
