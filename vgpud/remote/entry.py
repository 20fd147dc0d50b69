"""The start of a session process, as root: reads the door's call, and verifies its token or certificate.

vgpud-remote-session@.service starts this program for each connection of accept.py, its standard input, and
accept.py passes it a connection of the door. A caller without a grant makes it load only the imports of this
module. The rest (session.py) is imported to open a slice, for the door's own call, and to log a failure.
"""

import os
import signal
import socket
import sys
from contextlib import suppress

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.remote import wire
from vgpud.remote.grants import of_this_node

_FIRST_LINE_SECONDS = 10.0
_OF_THE_CALLER = (ErrorCode.BAD_REQUEST, ErrorCode.NOT_ALLOWED)  # errors that the door logs itself


def main() -> int:
    """Serves the connection of the door that arrives on standard input, until it is closed."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    door = _door()
    door.settimeout(_FIRST_LINE_SECONDS)
    try:
        _serve(door, wire.decode(_line(door)))
    except (VgpuError, OSError) as error:
        failure = error if isinstance(error, VgpuError) else _failed(error)
        if failure.code not in _OF_THE_CALLER:
            from vgpud.remote import session

            session.log_failure(failure)
        with suppress(OSError):  # the door may have closed the connection
            door.sendall(wire.refusal(_told(failure)))
        return failure.code.exit_code
    return 0


def _door() -> socket.socket:
    with socket.socket(fileno=os.dup(0)) as accepter:
        accepter.sendall(b"\0")  # asks for the connection
        _, (descriptor,), _, _ = socket.recv_fds(accepter, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=descriptor)


def _serve(door: socket.socket, call: wire.Call) -> None:
    if isinstance(call, wire.Attach | wire.Resume):
        sentence = "a session process answers only the calls open, status and settings"
        raise VgpuError(ErrorCode.BAD_REQUEST, sentence, wire.JOURNAL)
    if isinstance(call, wire.Settings):
        from vgpud.remote import session

        session.tell_settings(door)
        return
    grants, _ = of_this_node()
    grant = grants.find(call.token, call.certificate)
    if isinstance(call, wire.Status):
        door.sendall(wire.answer({"user": grant.user}))
        return
    from vgpud.remote import session

    session.serve(door, call, grant, grants)


def _told(failure: VgpuError) -> VgpuError:
    """Returns the error for the client. While the file of grants cannot be read, the client is not
    authenticated, so it must not learn the file's path or contents.
    """
    if failure.code is not ErrorCode.LEDGER_FAILED:
        return failure
    return VgpuError(failure.code, "the node cannot read its grants", wire.JOURNAL)


def _failed(error: OSError) -> VgpuError:
    said = (error.strerror or str(error)).lower()
    return VgpuError(ErrorCode.HELPER_FAILED, f"the remote session failed: {said}", wire.JOURNAL)


def _line(door: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) <= wire.LINE_BYTES:
        part = door.recv(4096)
        if not part:
            break
        line += part
    return line


if __name__ == "__main__":
    sys.exit(main())
