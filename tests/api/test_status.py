"""Errors as any gRPC client receives them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from vgpud.api import status
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError


class Failing:
    """A plain grpcio server on which every GetNode call ends with `status`, or with an error of gRPC itself
    (code, text).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.status: grpc.Status | None = None
        self.plain: tuple[grpc.StatusCode, str] | None = None
        self.server = grpc.server(ThreadPoolExecutor(2))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._get_node)
        generic = grpc.method_handlers_generic_handler("vgpud.v1.Vgpud", {"GetNode": handler})
        self.server.add_generic_rpc_handlers((generic,))
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def _get_node(self, data: bytes, context: Any) -> bytes:
        if self.status is not None:
            context.abort_with_status(self.status)
        assert self.plain is not None
        context.abort(*self.plain)
        return b""

    def error(self) -> VgpuError:
        with Client(self.path) as client, pytest.raises(VgpuError) as caught:
            client.get_node()
        return caught.value


@pytest.fixture
def failing(tmp_path: Path) -> Any:
    made = Failing(tmp_path / "s")
    yield made
    made.server.stop(None)


def test_every_error_survives_the_grpc_status(failing: Failing) -> None:
    for code in ErrorCode:
        sent = VgpuError(code, f"würde {code.number} sein", "tu was", ("one", "two"))
        failing.status = status.to_status(sent)
        assert failing.error() == sent


def test_each_error_has_the_grpc_status_of_the_error_table(failing: Failing) -> None:
    failing.status = status.to_status(VgpuError(ErrorCode.NO_CAPACITY, "no room", ""))
    with grpc.insecure_channel(f"unix:{failing.path}") as channel, pytest.raises(grpc.RpcError) as caught:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/vgpud.v1.Vgpud/GetNode")
        call(b"")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "no room"


def test_a_long_error_is_shortened_so_that_grpcs_default_limits_let_it_through(failing: Failing) -> None:
    sent = VgpuError(ErrorCode.IMPOSSIBLE, "ü" * 5000, "h" * 5000, tuple("d" * 100 for _ in range(500)))
    failing.status = status.to_status(sent)
    got = failing.error()
    assert got.code is ErrorCode.IMPOSSIBLE
    assert got.sentence.startswith("üüü")
    assert got.sentence.endswith("...")
    assert got.details[0] == "d" * 100
    assert got.details[-1] == f"and {500 - (len(got.details) - 1)} more"
    # a client with grpcio's default limits receives the whole error
    with grpc.insecure_channel(f"unix:{failing.path}") as channel, pytest.raises(grpc.RpcError) as caught:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/vgpud.v1.Vgpud/GetNode")
        call(b"")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.DEADLINE),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.UNSUPPORTED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.BAD_REQUEST),
        (grpc.StatusCode.CANCELLED, ErrorCode.STOPPING),
        (grpc.StatusCode.INTERNAL, ErrorCode.BUG),
        (grpc.StatusCode.UNKNOWN, ErrorCode.BUG),
    ],
)
def test_errors_of_grpc_become_numbered_errors(
    failing: Failing, code: grpc.StatusCode, number: ErrorCode
) -> None:
    failing.plain = (code, "words")
    got = failing.error()
    assert got.code is number
    assert got.hint
    assert str(failing.path) in got.sentence


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: unix:/x: Connection refused", "refused"),
        ("last error: UNAVAILABLE: unix:/x: recvmsg:Connection reset by peer (104)", "reset by peer"),
        ("Socket closed", "socket closed"),
    ],
)
def test_an_absent_daemon_is_reported_in_one_sentence(failing: Failing, said: str, why: str) -> None:
    failing.plain = (grpc.StatusCode.UNAVAILABLE, said)
    words = why if why == "socket closed" else f"connection {why}"
    assert failing.error().sentence == f"vgpud does not answer at {failing.path}: {words}"


def test_an_unknown_error_number_keeps_its_sentence() -> None:
    got = status.error(pb.Error(number=999, sentence="new", hint="h"))
    assert got == VgpuError(ErrorCode.BUG, "new", "h")
