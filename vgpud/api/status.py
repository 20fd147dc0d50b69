"""VgpuError <-> gRPC status, with an `Error` message as google.rpc.Status detail.

https://grpc.io/docs/guides/error/ ("richer error model"): the details travel in the trailing metadata, which
clients limit to 8 KiB by default, so the texts below are bounded well under that.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # ships without stubs
from grpc_status import rpc_status

from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.api.sockets import unreachable
from vgpud.model.errors import BY_NUMBER, ErrorCode, VgpuError

# Bytes of a sentence, a hint or a detail. gRPC also sends the sentence as its own message, in which each byte
# can take three.
_MAX_TEXT_BYTES = 512
_MAX_DETAILS_BYTES = 2048

_NOT_OURS: dict[grpc.StatusCode, ErrorCode] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    # gRPC itself answers RESOURCE_EXHAUSTED to a message over the size limit, and to too many calls at once
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.BAD_REQUEST,
    # a daemon whose grace period ended cancels its calls
    grpc.StatusCode.CANCELLED: ErrorCode.STOPPING,
}
_HINTS: dict[ErrorCode, str] = {
    ErrorCode.UNSUPPORTED: "see if vgpuctl and vgpud are of one version",
    ErrorCode.BAD_REQUEST: "ask for less in one call",
    ErrorCode.STOPPING: "try again when 'vgpuctl status' answers",
    ErrorCode.BUG: "see journalctl -u vgpud",
}


def to_status(failure: VgpuError) -> grpc.Status:
    """The gRPC status of a VgpuError, for `abort_with_status`."""
    # `encode` is imported only when the daemon needs it, so that vgpuctl starts faster
    from vgpud.api import encode

    sent = encode.error(
        VgpuError(
            failure.code,
            _shortened(failure.sentence),
            _shortened(failure.hint),
            tuple(_fitting(failure.details)),
        )
    )
    detail = Any()
    detail.Pack(sent)
    code = grpc.StatusCode[failure.code.status]
    message = Status(code=code.value[0], message=sent.sentence, details=[detail])
    return rpc_status.to_status(message)


def from_rpc_error(failure: grpc.RpcError, socket: Path, timeout_seconds: float | None) -> VgpuError:
    """The VgpuError of a call that failed on `socket`: vgpud's own error if vgpud sent one, otherwise one for
    gRPC's status.
    """
    call = cast(grpc.Call, failure)
    ours = _ours(call)
    if ours is not None:
        return ours
    said = call.details() or ""
    code = call.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        # The kernel's reason follows gRPC's own text: "...: unix:PATH: recvmsg:Connection reset by peer
        # (104)".
        return unreachable(socket, said.rpartition(":")[2].partition(" (")[0].strip().lower())
    number = _NOT_OURS.get(code, ErrorCode.BUG)
    if number is ErrorCode.DEADLINE:
        return _late(socket, timeout_seconds)
    return VgpuError(number, f"the call by {socket} failed with {code.name}: {said}", _HINTS[number])


def _late(socket: Path, timeout_seconds: float | None) -> VgpuError:
    limit = "the time given" if timeout_seconds is None else f"{timeout_seconds:g} s"
    return VgpuError(
        ErrorCode.DEADLINE,
        f"vgpud at {socket} did not answer within {limit}",
        "give it more time, or see what holds it: journalctl -u vgpud",
    )


def _ours(call: grpc.Call) -> VgpuError | None:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # the error detail does not match the status code or message of the call
        return None
    for detail in status.details if status is not None else ():
        sent = pb.Error()
        if detail.Unpack(sent):
            return error(sent)
    return None


def error(sent: pb.Error) -> VgpuError:
    """Decodes an error. An unknown number, from a newer daemon, becomes BUG; the texts are kept."""
    code = BY_NUMBER.get(sent.number, ErrorCode.BUG)
    return VgpuError(code, sent.sentence, sent.hint, tuple(sent.details))


def _shortened(line: str) -> str:
    data = line.encode("utf-8", "replace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    return data[: _MAX_TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."


def _fitting(details: tuple[str, ...]) -> Iterator[str]:
    room = _MAX_DETAILS_BYTES
    for i, detail in enumerate(details):
        line = _shortened(detail)
        room -= len(line.encode())
        if room < 0:
            yield f"and {len(details) - i} more"
            return
        yield line
