"""gRPC with the kubelet on Unix sockets: small calls in both directions. Errors are texts for a pod's
events.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.message import Message

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Reply = TypeVar("Reply", bound=Message)

_MAX_BYTES = 64 * 1024 * 1024  # maximum size of a message: a thousand pods with a thousand ids each
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
)


def server() -> grpc.aio.Server:
    return grpc.aio.server(options=_OPTIONS)


def bind(running: grpc.aio.Server, path: Path) -> None:
    """Binds the server to a Unix socket, which only root can connect to, as its callers count as root. Raises
    VgpuError(BAD_SETTING) if that fails.
    """
    try:
        running.add_insecure_port(f"unix:{quote(str(path))}")
        path.chmod(0o600)
    except (RuntimeError, OSError) as error:
        raise VgpuError(
            ErrorCode.BAD_SETTING,
            f"cannot listen on {path}: {error}",
            "check the rights of the folder, and set VGPUD_KUBELET_DIR to the kubelet's --root-dir",
        ) from None


def answering(
    name: str, request: type[Message], work: Callable[[Any], Awaitable[Message]]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Wraps a method with one request and one reply. A VgpuError becomes a gRPC status with its sentence."""

    async def call(asked: Any, context: Context) -> Message:  # noqa: ANN401
        try:
            return await work(asked)
        except VgpuError as error:
            log.warning(LogEvent.KUBELET_CALL_REFUSED, call=name, why=str(error), details=error.details)
            failure = error
        except Exception:
            log.exception(LogEvent.BUG_IN_KUBELET_CALL, call=name)
            failure = VgpuError(
                ErrorCode.BUG, f"a bug in vgpud made {name} fail", "report this with the journal of vgpud"
            )
        return await refuse(context, failure)

    return grpc.unary_unary_rpc_method_handler(
        call,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


async def refuse(context: Context, error: VgpuError) -> NoReturn:
    await context.abort(getattr(grpc.StatusCode, error.code.status), words(error))


def words(error: VgpuError) -> str:
    """The text of an error in one line: the sentence and the hint."""
    return f"{error}; {error.hint}" if error.hint else str(error)


async def ask(
    socket: Path, method: str, request: Message, reply: type[Reply], timeout_seconds: float
) -> Reply:
    """Makes one call over a new connection. Raises VgpuError(UNREACHABLE) with the kubelet's message."""
    options = (*_OPTIONS, ("grpc.default_authority", "localhost"))
    async with grpc.aio.insecure_channel(f"unix:{quote(str(socket))}", options=options) as channel:
        call: Callable[..., Awaitable[Reply]] = channel.unary_unary(
            method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            return await call(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise VgpuError(
                ErrorCode.UNREACHABLE,
                f"the call to the kubelet at {socket} failed, {error.code().name.lower()}: {error.details()}",
                "see the kubelet's journal",
            ) from None
