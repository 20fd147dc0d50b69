"""Gives session processes the connections of the door, as root.

systemd starts a session process (entry.py) for each connection to session.sock, and has a copy of that
connection. If the account of the door could connect there, systemd would close files that it passed
(SCM_RIGHTS), and such a close can wait without end (vgpud/untrusted.py). So the door connects to remote.sock,
which systemd does not have. This process holds each connection until its session has ended.
"""

import argparse
import os
import pwd
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from vgpud import sd
from vgpud.remote.wire import DOOR_SOCKET
from vgpud.settings import load_settings
from vgpud.untrusted import Untrusted, refuse_descriptors

_SESSION_SOCKET = "session.sock"  # in the run folder
_MOST = 1024  # connections at a time; the same as MaxConnections= of vgpud-remote-session.socket
_BACKLOG = 1024


def main(words: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="vgpud-remote-accept", description="give sessions their connections"
    )
    parser.add_argument("--user", help="the account of the door, if it is another")
    arguments = parser.parse_args(words)
    settings = load_settings()
    Untrusted.program = settings.arbiter
    uid = os.geteuid() if arguments.user is None else pwd.getpwnam(arguments.user).pw_uid
    listener = _listen(settings.run_dir / DOOR_SOCKET, uid)
    sd.notify("READY=1")
    _serve(listener, settings.run_dir / _SESSION_SOCKET)


def _listen(path: Path, uid: int) -> Untrusted:
    """Listens on a new socket file that only root and `uid` may connect to. Raises OSError."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    listener = Untrusted(socket.AF_UNIX)
    refuse_descriptors(listener)
    os.umask(0o177)
    listener.bind(str(new))
    os.chown(new, uid, -1)
    listener.keep()
    listener.listen(_BACKLOG)
    new.rename(path)
    return listener


def _serve(listener: Untrusted, sessions: Path) -> NoReturn:
    """Serves without end. Raises OSError if a connection cannot be accepted."""
    opened: dict[int, tuple[socket.socket, socket.socket]] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == listener.fileno():
                door, _ = listener.accept()
                session = _connect(sessions) if len(opened) < _MOST else None
                if session is None:
                    door.close()
                    continue
                opened[session.fileno()] = door, session
                poll.register(session, select.POLLIN)
            elif not _pass(*opened[ready]):
                poll.unregister(ready)
                for each in opened.pop(ready):
                    each.close()


def _connect(sessions: Path) -> socket.socket | None:
    session = socket.socket(socket.AF_UNIX)
    session.setblocking(False)
    try:
        session.connect(str(sessions))
    except OSError:  # systemd does not listen there, or its queue is full
        session.close()
        return None
    return session


def _pass(door: socket.socket, session: socket.socket) -> bool:
    """Passes the connection to a session process that asks for it. Returns False if the process has ended."""
    with suppress(OSError):
        return bool(session.recv(1)) and bool(socket.send_fds(session, [b"\0"], [door.fileno()]))
    return False


if __name__ == "__main__":
    main()
