"""Sends orders to vgpu-arbiter over its control socket (native/common/lease.h defines the messages)."""

import errno
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from vgpud import lease_layout as layout
from vgpud.model.errors import ErrorCode, VgpuError

_QUESTIONS = (layout.MSG_LIST, layout.MSG_LOOK)
_SILENCE_SECONDS, _BRIEF_SECONDS = 10.0, 0.25


@dataclass(frozen=True, slots=True)
class Registered:
    """The arbiter's state of a lease. `pids` are its live registered processes, in the arbiter's pid
    namespace. `cuts` counts how often the arbiter truncated a `usage` file that was too large. `shut`: that
    file has so many locks that the arbiter no longer checks them. Both happen only by tampering, because
    libvgpu does neither. `refusal` is the driver's answer if the arbiter could not preempt or resume the
    tenant ("status 0x56"), and "" otherwise; after a refusal, libvgpu's gate enforces the tenant's time
    slices. `paused`: the lease is paused, and all of its processes are off their devices.
    """

    pids: tuple[int, ...] = ()
    cuts: int = 0
    shut: bool = False
    refusal: str = ""
    paused: bool = False


class ArbiterClient:
    """Sends orders to vgpu-arbiter. Blocking and thread-safe. Each order uses its own connection and waits at
    most timeout_seconds for its answer.

    The arbiter answers within milliseconds on an idle host. With seven busy programs per core, 0.7 s was
    measured, and 2 s was exceeded. A client waits 30 s: within this time the default allows an order and the
    order that undoes it, but not also the start of an arbiter. After an order was not answered, questions
    about leases (`look`, `list`) wait only briefly for some seconds, or until the next answer. So a request
    that asks about many leases waits fully for one of them only.
    """

    def __init__(self, path: Path, timeout_seconds: float = 10.0) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds
        # After an order without an answer, questions wait only briefly until this time (monotonic clock).
        self._silent_until = 0.0

    def ready(self) -> bool:
        """True if an arbiter answers on the control socket."""
        try:
            self._ask(layout.MSG_LIST, "none")
        except VgpuError:
            return False
        return True

    def add(self, allocation: str) -> None:
        """Makes the arbiter serve this lease. Idempotent. Raises VgpuError HELPER_FAILED or
        HELPER_TIMEOUT.
        """
        self._check(self._ask(layout.MSG_ADD, allocation), f"serve lease {allocation}")

    def remove(self, allocation: str) -> None:
        """Makes the arbiter drop this lease. Idempotent. Raises as `add` does."""
        self._check(self._ask(layout.MSG_REMOVE, allocation), f"drop lease {allocation}", (errno.ENOENT,))

    def look(self, allocation: str) -> None:
        """Makes the processes of the lease read its state and report their activity (`read_activity`). Raises
        as `add` does, and HELPER_FAILED for a lease that is not served.
        """
        self._check(self._ask(layout.MSG_LOOK, allocation), f"ask lease {allocation}")

    def list(self, allocation: str) -> tuple[int, ...]:
        """The pids of the lease's registered processes. Raises as `add` does."""
        return self.registered(allocation).pids

    def registered(self, allocation: str) -> Registered:
        """The arbiter's state of a lease; empty for a lease that it does not serve. Raises as `add` does."""
        reply = self._list(allocation)
        if reply is None:
            return Registered()
        (count,) = struct.unpack_from("<q", reply, layout.MESSAGE_VALUE)
        count = max(0, min(count, layout.MAX_SLOTS))
        pids = struct.unpack_from(f"<{count}i", reply, layout.PROCESS_LIST_PIDS)
        cuts, shut = struct.unpack_from("<II", reply, layout.MESSAGE_SLOT)
        (flags,) = struct.unpack_from("<I", reply, layout.MESSAGE_TURN_FLAGS)
        refusal = _refusal(reply) if flags & layout.LIST_REFUSED else ""
        return Registered(pids, cuts, shut != 0, refusal, flags & layout.LIST_PAUSED != 0)

    def follows_links(self, allocation: str) -> bool:
        """Whether the arbiter serves a lease whose folder is a link (homes.py). One that runs since before an
        upgrade does not. Raises as `add` does.
        """
        (flags,) = struct.unpack_from("<I", self._ask(layout.MSG_LIST, allocation), layout.MESSAGE_TURN_FLAGS)
        return bool(flags & layout.LIST_LINKS)

    def _list(self, allocation: str) -> bytes | None:
        reply = self._ask(layout.MSG_LIST, allocation)
        (kind,) = struct.unpack_from("<I", reply)
        if kind == layout.MSG_PROCESSES and len(reply) == layout.PROCESS_LIST_SIZE:
            return reply
        self._check(reply, f"list lease {allocation}", (errno.ENOENT,))
        return None

    def _ask(self, kind: int, allocation: str) -> bytes:
        head = struct.pack("<IIIIq", kind, layout.VERSION, layout.NO_SLOT, 0, 0)
        message = (head + allocation.encode()[: layout.ID_BYTES - 1]).ljust(layout.MESSAGE_SIZE, b"\0")
        reply = self._receive(message, self._patience_seconds(kind))
        if len(reply) < layout.MESSAGE_SIZE:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"vgpu-arbiter sent a reply of {len(reply)} bytes, which is too short",
                "upgrade vgpud and vgpu-arbiter to the same version",
            )
        return reply

    def _patience_seconds(self, kind: int) -> float:
        if kind in _QUESTIONS and time.monotonic() < self._silent_until:
            return min(self._timeout_seconds, _BRIEF_SECONDS)
        return self._timeout_seconds

    def _receive(self, message: bytes, patience_seconds: float) -> bytes:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.settimeout(patience_seconds)
                line.connect(str(self._path))
                line.send(message)
                reply = line.recv(layout.PROCESS_LIST_SIZE)
                if not reply:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                self._silent_until = 0.0
                return reply
        except TimeoutError as error:
            if patience_seconds == self._timeout_seconds:
                self._silent_until = time.monotonic() + _SILENCE_SECONDS
            raise VgpuError(
                ErrorCode.HELPER_TIMEOUT,
                f"vgpu-arbiter did not answer within {patience_seconds:g} seconds",
                "see the log of vgpu-arbiter; tenants keep their limits meanwhile",
            ) from error
        except OSError as error:
            raise VgpuError(
                ErrorCode.HELPER_FAILED,
                f"vgpu-arbiter cannot be reached at {self._path}: {os.strerror(error.errno or 0).lower()}",
                "vgpud starts it again by itself, and 'vgpuctl events' tells when; tenants keep their limits",
            ) from error

    @staticmethod
    def _check(reply: bytes, what: str, fine: tuple[int, ...] = ()) -> None:
        kind = struct.unpack_from("<I", reply)[0]
        (number,) = struct.unpack_from("<q", reply, layout.MESSAGE_VALUE)
        if kind == layout.MSG_OK or (kind == layout.MSG_ERROR and number in fine):
            return
        raise VgpuError(
            ErrorCode.HELPER_FAILED,
            f"vgpu-arbiter cannot {what}: {os.strerror(number).lower() if 0 < number < 4096 else kind}",
            "see the log of vgpu-arbiter",
        )


def _refusal(reply: bytes) -> str:
    (status,) = struct.unpack_from("<Q", reply, layout.MESSAGE_TURN_NUMBER)
    (error,) = struct.unpack_from("<Q", reply, layout.MESSAGE_TURN_LENGTH_NS)
    return f"status {status:#x}" if status or not 0 < error < 4096 else os.strerror(error).lower()
