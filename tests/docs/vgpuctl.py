"""Runs vgpuctl in a fork of a process that has its imports (tests/prepared.py).

python -IS vgpuctl.py LINE [ARGUMENTS] LINE: the descriptor of tests/prepared.py's line_to()

It exits as vgpuctl does.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(line: int, *arguments: str) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = json.dumps(["vgpud.ctl.main", arguments, dict(os.environ), str(Path.cwd()), None]).encode()
    with theirs, socket.socket(fileno=line) as forker:
        socket.send_fds(forker, [asked], [theirs.fileno(), 0, 1, 2])
    pid = int(ours.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(int(ours.recv(64)))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
