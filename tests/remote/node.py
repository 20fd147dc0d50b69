"""A vgpud with the door for remote slices, and clients of it, all on the loopback address."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from tests import prepared
from tests.conditions import CONDITIONS, unmet
from tests.demo.node import ROOT, Command, Daemon, DemoNode
from tests.e2e.conftest import end_process
from tests.e2e.support import client
from tests.lease.conftest import eventually as until
from tests.ports import free_port
from tests.remote.networks import NODE, Networks
from tests.simnode import BUILD
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.remote.grants import FILE

CERTIFICATES = Path(__file__).parent / "certificates"
_ENGINE = Path(__file__).parent / "engine.py"
#: the account that grants are for; each distribution has it
USER = "daemon"
# without installed packages, because the program needs none
PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).parent / "program.py"))


class Client(Command, Protocol):
    """A process of `vgpuctl remote`."""

    @property
    def stderr(self) -> IO[str] | None: ...


class Sessions:
    """Starts a session process for each connection to session.sock, as systemd does for a socket with
    Accept=yes. `before` is the beginning of a command that runs the process.
    """

    before: Sequence[str] = ()
    _MODULE = "vgpud.remote.entry"

    def __init__(self, node: DemoNode, log: Path) -> None:
        self.processes: list[Daemon] = []
        self._node = node
        self._log = log
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(node.run_dir / "session.sock"))
        self._listener.listen(128)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, self._log.open("ab") as log:
                    self.processes.append(self._start(connection.fileno(), log.fileno()))

    def _start(self, stdin: int, log: int) -> Daemon:
        environment = self._node.environment
        if not self.before:
            return prepared.program(self._MODULE, (), environment, stdin, log)
        words = [*self.before, sys.executable, "-m", self._MODULE]
        return subprocess.Popen(words, stdin=stdin, stderr=log, env=environment, cwd=ROOT)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for process in self.processes:
            end_process(process)


class RemoteNode:
    """A vgpud with a door for remote slices. `policy` is the text of the table [remote], without server and
    listen. The door and its clients run in `networks`, or else in the network of the test. With `stands`, the
    door's clock moves only by `set_clock`.
    """

    def __init__(
        self,
        node: DemoNode,
        policy: str = "",
        server: Path | None = None,
        networks: Networks | None = None,
        stands: bool = False,
    ) -> None:
        self._module = "tests.remote.door" if stands else "vgpud.remote.door"
        self._of_door, self._of_client = (networks.node, networks.client) if networks else ([], [])
        self.host = NODE if networks else "127.0.0.1"
        self.port = free_port()
        self.node = node
        self.log = self.node.folder / "remote.log"
        config = Path(self.node.environment["VGPUD_CONFIG"])
        server = server or self._stand_in()
        config.write_text(
            f"{config.read_text()}\n[remote]\n"
            f'server = "{server}"\nlisten = "{self.host}:{self.port}"\n{policy}\n'
        )
        (config.parent / "remote").mkdir()
        pem = config.parent / "remote" / "certificate.pem"
        pem.write_bytes((CERTIFICATES / "door.pem").read_bytes())
        (self.node.folder / "libcuda.so.1").touch()  # stands in for the client's library
        if self.node.daemon is None:
            self.node.start()
        self.sessions = Sessions(self.node, self.log)
        self.accepter = self._start_accepter()
        self._clock = self.node.folder / "clock"
        self.set_clock(0)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self.node.folder / "notify"))
        self.door = self.start_door()

    def _stand_in(self) -> Path:
        """Writes the program that stands in for Lupine's server. It runs on the simulated node."""
        if lacking := CONDITIONS["open-python"].missing():
            unmet("open-python", lacking)
        script, folder = self.node.folder / "server", self.node.folder
        # copies, because other users cannot enter the source tree below a closed folder
        own, simulated = folder / "lib", folder / "sim"
        shutil.copytree(BUILD / "lib", own)
        shutil.copytree(BUILD / "sim" / "lib", simulated, symlinks=True)
        engine = shutil.copy(_ENGINE, folder)
        self.node.environment["VGPUD_LIB_DIR"] = str(own)
        # a folder of another name, because pytest's own folders are closed to other users
        state = folder / "devices"
        state.hardlink_to(self.node.environment["VGPU_SIM_STATE"])
        state.chmod(0o666)  # as the device files are
        kept = {"VGPU_SIM_STATE": str(state), "LD_LIBRARY_PATH": str(simulated)}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in kept.items()]
        preload = f'export LD_PRELOAD="$LD_PRELOAD:{simulated / "libvgpu-sim-rm.so"}"'
        # the system's Python, because other users cannot enter the source tree with the virtual environment
        python = Path(sys.executable).resolve()
        script.write_text("\n".join(["#!/bin/sh", *lines, preload, f"exec {python} {engine}", ""]))
        script.chmod(0o755)
        return script

    def _start_accepter(self) -> Daemon:
        with self.log.open("ab") as log:
            made = prepared.program("vgpud.remote.accept", (), self.node.environment, 0, log.fileno())
        until((self.node.run_dir / "remote.sock").exists)
        return made

    def start_door(self) -> Daemon:
        """Starts the door and waits until it tells systemd that it listens."""
        names = ("--certificate", "door.pem"), ("--key", "door.key"), ("--clients", "authority.pem")
        files = [word for option, file in names for word in (option, str(CERTIFICATES / file))]
        with self.log.open("ab") as log:
            door = self._launch_door(files, log.fileno())
        until(lambda: door.poll() is not None or self._is_ready())
        if door.poll() is None:
            return door
        raise RuntimeError(f"the door ended: {self.log.read_text()}")

    def _is_ready(self) -> bool:
        try:
            return b"READY=1" in self._notify.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def _launch_door(self, words: Sequence[str], log: int) -> Daemon:
        told = {"VGPU_TEST_CLOCK": str(self._clock), "NOTIFY_SOCKET": self._notify.getsockname()}
        environment = {**self.node.environment, **told}
        if not self._of_door:
            return prepared.program(self._module, words, environment, 0, log)
        command = [*self._of_door, sys.executable, "-m", self._module, *words]
        return subprocess.Popen(command, env=environment, stderr=log, cwd=ROOT)

    def set_clock(self, seconds: float) -> None:
        self.clock = seconds
        new = self._clock.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._clock)

    def grant(self, *options: str, user: str = USER) -> str:
        """Makes a grant and returns its token."""
        return self.node.ctl("remote", "grant", user, *options).stdout.strip()

    def expire(self, token: str) -> None:
        """Sets the expiry of the grant to a time in the past."""
        self.rewrite(token, expires=1)

    def rewrite(self, token: str, **fields: int) -> None:
        """Changes the grant in the file."""
        path = Path(self.node.environment["VGPUD_STATE_DIR"]) / FILE
        rows = json.loads(path.read_text())
        path.write_text(
            json.dumps([{**one, **fields} if token.startswith(one["id"]) else one for one in rows])
        )

    def client(
        self, token: str, *options: str, command: Sequence[str] = PROGRAM, verb: str = "run"
    ) -> Client:
        """Starts `vgpuctl remote VERB` with this token, in an environment that has nothing of the node."""
        tail = ["--library", str(self.node.folder), *options, "--", *command] if verb == "run" else [*options]
        words = ["remote", verb, f"{self.host}:{self.port}", *tail]
        environment = {name: os.environ[name] for name in ("PATH",)} | {"VGPU_REMOTE_TOKEN": token}
        if not self._of_client:
            return prepared.ctl(words, environment, self.node.environment, pipe=True)
        return subprocess.Popen(
            [*self._of_client, sys.executable, "-m", "vgpud.ctl", *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def held(self) -> list[pb.Allocation]:
        with client(self.node) as calls:
            return list(calls.list_allocations().allocations)

    def close(self) -> None:
        end_process(self.door)
        self.sessions.close()  # each session ends with its connection to the door
        end_process(self.accepter)
        self._notify.close()
