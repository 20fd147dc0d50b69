"""Sends commands to one MPS control daemon, and verifies each setting by reading it back.

Facts (measured on nvidia-cuda-mps-control 535 to 615): a refusal has exit status 0; a bad value silently
keeps the old one; `get_default_device_pinned_mem_limit` prints whole GiB, rounded down, from 1 GiB up and MiB
below; "Cannot find MPS control daemon process" with status 1 is the only reliable sign that no daemon
answers. Defaults apply to servers that start later. A running server is set by its pid, and applies the value
to later clients (MPS guide, "set_active_thread_percentage PID"). While one connection is open and silent, a
daemon answers no other connection (535, 550).
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent
from vgpud.model.quantity import Percent
from vgpud.modes.mps import answers
from vgpud.modes.mps.answers import ListedClient, Partitions
from vgpud.modes.mps.rules import MpsLimits

log = structlog.get_logger(__name__)

# what the control daemons of 535 and 550 answer when two programs connect at the same time
_BUSY = "Cannot send command"
_BUSY_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class MpsControl:
    """The client of one control daemon. `program` is nvidia-cuda-mps-control; `pipe` is the folder of the
    daemon's sockets.
    """

    program: str
    pipe: Path
    log: Path
    timeout_seconds: float = 5.0

    def environment(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    # --- questions

    def ask(self, command: str) -> str:
        """Returns the daemon's answer to one command.

        Raises VgpuError: HELPER_FAILED if no daemon answers, HELPER_TIMEOUT if the daemon does not answer in
        time.
        """
        try:
            done = self._run_when_free(command)
        except subprocess.TimeoutExpired:
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"the MPS control daemon in {self.pipe} did not answer {command.split(maxsplit=1)[0]!r} "
                f"in {self.timeout_seconds:g} s",
                "see its log in " + str(self.log),
            ) from None
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"{self.program} cannot be run: {(error.strerror or str(error)).lower()}",
                "install NVIDIA's nvidia-cuda-mps package (it comes with the driver)",
            ) from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"the MPS control daemon in {self.pipe} does not answer: {said[-1] if said else 'no word'}",
                "see its log in " + str(self.log),
            )
        return done.stdout.strip()

    def _run_when_free(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs the program. It is run again while the daemon refuses the connection, because a daemon serves
        one connection at a time.
        """
        env = {**os.environ, **self.environment()}
        done = _run(self.program, command, env, self.timeout_seconds)
        for pause in _BUSY_PAUSES_SECONDS:
            if done.returncode == 0 or _BUSY not in done.stderr + done.stdout:
                break
            time.sleep(pause)
            done = _run(self.program, command, env, self.timeout_seconds)
        return done

    def answers(self) -> bool:
        try:
            self.ask("get_default_active_thread_percentage")
        except VgpuError:
            return False
        return True

    def servers(self) -> tuple[int, ...]:
        return answers.pids(self.ask("get_server_list"))

    def clients(self) -> tuple[ListedClient, ...]:
        """The clients of all servers. If `ps` (branch 535 and later) lists none, each server is asked."""
        listed = answers.clients(self.ask("ps"))
        if listed:
            return listed
        return tuple(
            ListedClient(pid, server, "")
            for server in self.servers()
            for pid in answers.pids(self.ask(f"get_client_list {server}"))
        )

    def server_state(self, server: int) -> str:
        return answers.server_state(self.ask(f"get_server_status {server}"))

    # --- settings

    def limit(self, limits: MpsLimits, below_normal: bool | None = None) -> None:
        """Sets the limits for all later clients, and reads them back.

        If `below_normal` is None, the priority is not set (branches before 535 have no priority). Raises
        VgpuError(MPS_REFUSED).
        """
        self.set_default_memory(limits.memory_mib)
        self.set_default_share(limits.share)
        if below_normal is not None:
            self.set_default_priority(below_normal)
        for server in self.servers():
            self._limit_server(server, limits)

    def changed(self, limits: MpsLimits, below_normal: bool | None = None) -> tuple[str, ...]:
        """A sentence for each setting that differs from the value that `limit` with the same arguments has
        set.

        On branch 535, any program that reaches the daemon may set limits. Raises VgpuError.
        """
        servers = [
            (f"active_thread_percentage {server}", f"device_pinned_mem_limit {server} 0")
            for server in self.servers()
        ]
        named = [("default_active_thread_percentage", "default_device_pinned_mem_limit 0"), *servers]
        found = []
        for share_name, memory_name in named:
            printed = answers.share(said := self.ask(f"get_{share_name}"))
            if printed is not None and not answers.share_agrees(limits.share.value, printed):
                found.append((share_name, said, f"{limits.share.value:g}"))
            word = answers.memory(said := self.ask(f"get_{memory_name}"))
            if answers.is_memory(word) and word != answers.memory_as_printed(limits.memory_mib):
                found.append((memory_name, word, f"{limits.memory_mib}M"))
        if below_normal is not None:
            said = self.ask("get_default_client_priority")
            wanted = "1" if below_normal else "0"
            if said and said.split()[-1] != wanted:
                found.append(("default client priority", said, wanted))
        return tuple(f"{name.replace('_', ' ')} {was!r} instead of {wanted}" for name, was, wanted in found)

    def set_default_share(self, share: Percent) -> None:
        """Sets the default share of clients. Raises VgpuError(MPS_REFUSED) if another value is read back."""
        self._set_share("default_active_thread_percentage", "", share)

    def set_default_memory(self, mebibytes: int) -> None:
        """Sets the default memory limit of clients on device 0, the only device of this daemon. Raises
        VgpuError(MPS_REFUSED) if another value is read back.
        """
        self._set_memory("default_device_pinned_mem_limit", "", mebibytes)

    def set_default_priority(self, below_normal: bool) -> None:
        """Sets the default priority of clients. Raises VgpuError(MPS_REFUSED) if another value is
        read back.
        """
        wanted = "1" if below_normal else "0"
        self.ask(f"set_default_client_priority {wanted}")
        answer = self.ask("get_default_client_priority")
        if answer.split()[-1:] != [wanted]:
            raise _refused("default client priority", wanted, answer)

    def _limit_server(self, server: int, limits: MpsLimits) -> None:
        try:
            self._set_memory("device_pinned_mem_limit", f"{server} ", limits.memory_mib)
            self._set_share("active_thread_percentage", f" {server}", limits.share)
        except VgpuError:
            if server in self.servers():
                raise
            log.debug(LogEvent.MPS_SERVER_ENDED_WHILE_LIMITS_WERE_SET, server=server)

    def _set_share(self, name: str, server: str, share: Percent) -> None:
        self.ask(f"set_{name}{server} {share.value:g}")
        answer = self.ask(f"get_{name}{server}")
        if server and _says_nothing(answer, answers.share(answer) is None):
            log.warning(LogEvent.MPS_SERVER_SHARE_UNREADABLE, server=server.strip(), answer=answer)
        elif answers.refusal(answer) or not answers.share_agrees(share.value, answers.share(answer)):
            raise _refused(name.replace("_", " "), f"{share.value:g}", answer)

    def _set_memory(self, name: str, server: str, mebibytes: int) -> None:
        self.ask(f"set_{name} {server}0 {mebibytes}M")
        answer = self.ask(f"get_{name} {server}0")
        if server and _says_nothing(answer, not answers.is_memory(answers.memory(answer))):
            log.warning(LogEvent.MPS_MEMORY_LIMIT_UNREADABLE, server=server.strip(), answer=answer)
        elif answers.memory(answer) != answers.memory_as_printed(mebibytes):
            raise _refused(name.replace("_", " "), f"{mebibytes}M", answer)

    # --- static SM partitions: they need Features.partitions, and a daemon that was started with -S

    def partitions(self) -> Partitions:
        """The chunks and partitions of the daemon's device. Raises VgpuError(MPS_REFUSED)."""
        answer = self.ask("lspart")
        found = answers.partitions(answer)
        if found is None:
            raise _refused("list of", "SM partitions", answer)
        return found

    def add_partition(self, device_uuid: str, chunks: int) -> str:
        """Makes a partition. Returns its name for CUDA_MPS_SM_PARTITION. Raises VgpuError(MPS_REFUSED)."""
        answer = self.ask(f"sm_partition add {device_uuid} {chunks}")
        name = None if answers.refusal(answer) else answers.partition_name(answer)
        if name is None:
            raise _refused("SM partition", f"of {chunks} chunks", answer)
        return name

    def remove_partition(self, device_uuid: str, identity: str) -> None:
        """Removes a partition. A partition with a client stays: the daemon's refusal is ignored. Raises
        VgpuError if the daemon does not answer.
        """
        self.ask(f"sm_partition rm {device_uuid} {identity}")

    # --- end of clients and servers

    def terminate_client(self, server: int, pid: int) -> None:
        """Ends the work of one MPS client. Raises VgpuError(MPS_REFUSED)."""
        answer = self.ask(f"terminate_client {server} {pid}")
        said = answers.refusal(answer)
        if said is not None:
            raise _refused(f"end of client {pid}", f"of server {server}", said)

    def shutdown_server(self, server: int) -> None:
        """Ends an MPS server at once, with all work that runs on it. The next client gets a new server."""
        self.ask(f"shutdown_server {server} -f")


def _run(
    program: str, command: str, env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Runs the program in a separate session: it may fork, and the whole session is killed at a timeout.

    Raises OSError, and subprocess.TimeoutExpired after killing the session.
    """
    with subprocess.Popen(
        [program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(command + "\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess([program], child.returncode, out, err)


def _says_nothing(answer: str, no_figure: bool) -> bool:
    """Is the answer neither a figure nor a refusal? Some branches may not print a server's limits.

    Such an answer is accepted for a server, because the guard enforces the tenant's limits in each process.
    It is never accepted for a default.
    """
    return no_figure and answers.refusal(answer) is None


def _refused(what: str, wanted: str, answer: str) -> VgpuError:
    return VgpuError(
        ErrorCode.MPS_REFUSED,
        f"the MPS control daemon did not accept the {what} {wanted}: it reads back {answer!r}",
        "see the control daemon's log; its driver may be too old",
    )
