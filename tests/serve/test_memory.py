"""The daemon's memory while another user sends messages that never end. Without the bounds it grows to 5.2 GB
in 24 s.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.otheruser import open_folder
from tests.systemd.test_memory import MIB, one_user
from vgpud.serve.intake import Bounds
from vgpud.serve.relay import ConnectionLimits

SERVER = """
import asyncio, sys
from pathlib import Path
from tests.serve.fake_keeper import FakeKeeper
from vgpud.serve.server import Server
from vgpud.serve.sockets import public_sockets
async def main():
    server = Server(FakeKeeper(), public_sockets(Path(sys.argv[1]), "", {}))
    await server.start()
    print("up", flush=True)
    await asyncio.to_thread(input)
    await server.stop(0.1)
asyncio.run(main())
"""
# Opens as many streams as a connection may have, and sends on each as much of a message as the server
# accepts.
ATTACKER = """
import os, sys
from pathlib import Path
from tests.serve.http2 import Peer
from vgpud.serve.server import MAX_REQUEST_BYTES
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
peers = []
for _ in range(int(sys.argv[2])):
    try:
        peer = Peer(Path(sys.argv[1]))
        peer.socket.settimeout(0.1)  # vgpud reads no more of a user with calls that wait
        peers.append(peer)
        for stream in [peer.open("Plan") for _ in range(64)]:
            peer.begin_message(stream, MAX_REQUEST_BYTES, bytes(16000))
            for _ in range(3):
                peer.more(stream, bytes(16000))
    except OSError:
        pass
print(len(peers), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as made:
        yield made


def peak_bytes(pid: int) -> int:
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@needs("root")
def test_the_memory_that_a_user_without_rights_can_make_vgpud_take_is_bounded(folder: Path) -> None:
    words = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout
        try:
            assert server.stdout.readline() == "up\n"
            before = peak_bytes(server.pid)
            attack = [sys.executable, "-c", ATTACKER, str(folder / "ro.sock"), "100"]
            done = subprocess.run(attack, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
            assert int(done.stdout) >= ConnectionLimits().per_stranger
            grown = peak_bytes(server.pid) - before
            share = one_user(ConnectionLimits().per_stranger, Bounds().calls_per_stranger)
            # besides the user's share the daemon may grow by 32 MiB, for Python's handling of so many
            # connections and refusals
            assert grown < share + 32 * MIB
        finally:
            server.communicate("\n", timeout=300)
