"""The messages of remote slices: one line of JSON for a call, and one for its reply. Pure.

A client sends its call to the door over TLS. The door sends calls to a session process over a Unix socket;
after the reply to `open`, each byte CONNECT asks for one connection to the engine's server. On its control
connection, after the reply, a client sends only the byte END, when it no longer needs the slice. If the
session ends for another reason, the session process sends the door the cause as an error reply, and the door
sends it to the client on the control connection. Older versions do not send this line.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from vgpud.model.errors import BY_NUMBER, ErrorCode, VgpuError

VERSION = 2
DOOR_SOCKET = "remote.sock"  # in the run folder; the door sends its calls there
DEFAULT_PORT = 14843
# Maximum of a line. The longest call has eight texts of 256 bytes, and JSON writes a byte as up to six.
LINE_BYTES = 16 * 1024
TEXT_BYTES = 256
# Maximum of the label in a call. The allocation's label has at most 256 characters: the user, the address,
# and then the label of the call.
LABEL_BYTES = 128
CONNECT = b"c"
END = b"e"
JOURNAL = "see the journal of vgpud-remote-session on the node"


@dataclass(frozen=True, slots=True)
class Open:
    """Asks for a slice. Sizes are written as for vgpuctl. The door sets `certificate` (the SHA-256 of the
    client's certificate) and `address`.
    """

    token: str = ""
    memory: str = ""
    cores: str = ""
    isolation: str = ""
    priority: str = ""
    label: str = ""
    certificate: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class Attach:
    """Makes this connection a connection between the program and the engine's server."""

    session: str
    key: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Makes this connection the session's control connection. The previous one is ended."""

    session: str
    key: str


@dataclass(frozen=True, slots=True)
class Status:
    """Asks for the sessions of the user of the token or certificate."""

    token: str = ""
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """Asks for the table [remote] of the policy. Only the door asks."""


Call = Open | Attach | Resume | Status | Settings
_CALLS: dict[str, type[Call]] = {
    "open": Open,
    "attach": Attach,
    "resume": Resume,
    "status": Status,
    "settings": Settings,
}
_NAMES = {kind: name for name, kind in _CALLS.items()}


def encode(call: Call) -> bytes:
    return _line({"version": VERSION, "call": _NAMES[type(call)], **asdict(call)})


def decode(line: bytes) -> Call:
    """Reads a call. Raises VgpuError(BAD_REQUEST)."""
    message = _parse(line)
    if message.pop("version", None) != VERSION:
        raise _bad(f"the caller does not speak version {VERSION} of vgpud's remote calls")
    kind = _CALLS.get(str(message.pop("call", "")))
    if kind is None:
        raise _bad("the call is not known")
    names = {one.name for one in fields(kind)}
    for name, value in message.items():
        if name not in names:
            raise _bad("the call has a field that is not known")
        most = LABEL_BYTES if name == "label" else TEXT_BYTES
        if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > most:
            raise _bad(f"{name} is not a text of at most {most} printable bytes", "shorten it")
    try:
        return kind(**message)
    except TypeError:
        raise _bad("the call lacks a field") from None


def answer(result: dict[str, Any]) -> bytes:
    return _line({"result": result})


def refusal(error: VgpuError) -> bytes:
    said = {"number": error.code.number, "sentence": error.sentence, "hint": error.hint}
    return _line({"error": said})


def result(line: bytes) -> dict[str, Any]:
    """Reads a reply. Raises VgpuError: the error in the reply, or BAD_REQUEST if it is no valid reply."""
    message = _parse(line)
    error = _error(message)
    if error is not None:
        raise error
    found = message.get("result")
    if not isinstance(found, dict):
        raise _bad("the reply has neither a result nor an error")
    return found


def cause(line: bytes) -> VgpuError | None:
    """Returns the error in a line of the control connection; None for any other line, which a later version
    of the door may send.
    """
    try:
        return _error(_parse(line))
    except VgpuError:
        return None


def check_opened(reply: dict[str, Any]) -> None:
    """Raises VgpuError(BAD_REQUEST) if the reply to `open` lacks what a client needs of it."""
    if not all(isinstance(reply.get(name), str) for name in ("session", "key", "engine")):
        raise _bad("the reply to open lacks the session, its key or its engine")
    grace = reply.get("grace")
    if not isinstance(grace, int | float) or not 0 <= grace < 1 << 63:
        raise _bad("the reply to open has no grace period in seconds")


def check_sessions(reply: dict[str, Any]) -> None:
    """Raises VgpuError(BAD_REQUEST) if the reply to `status` is no list of a user's sessions."""
    rows = reply.get("sessions")
    if "user" not in reply or not isinstance(rows, list) or not all(map(_is_session, rows)):
        raise _bad("the reply to status is not a list of sessions")


def _is_session(row: object) -> bool:
    # the id is printed as it is, so it can be nothing but an id
    return (
        isinstance(row, dict)
        and re.fullmatch("[0-9a-f]+", str(row.get("allocation"))) is not None
        and isinstance(row.get("bytes"), int)
        and {"address", "connections", "connected"} <= row.keys()
    )


def _error(message: dict[str, Any]) -> VgpuError | None:
    error = message.get("error")
    if not isinstance(error, dict):
        return None
    number = error.get("number")
    code = BY_NUMBER.get(number, ErrorCode.BUG) if isinstance(number, int) else ErrorCode.BUG
    return VgpuError(code, str(error.get("sentence", "")), str(error.get("hint", "")))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise _bad(f"a line has more than {LINE_BYTES} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise _bad("the line is not JSON") from None
    if not isinstance(message, dict):
        raise _bad("the line is not a JSON object")
    return message


def _bad(sentence: str, hint: str = "use a client of the same version as the node's vgpud") -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
