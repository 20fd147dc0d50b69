"""Tasks that still run when the daemon's work is done are cancelled, except those of calls that grpcio is
ending.
"""

import asyncio
from typing import Any

import grpc
import pytest

from vgpud.daemon import to_the_end


# grpcio ends a call in several steps of the event loop. The work ends before each of these steps in turn.
@pytest.mark.parametrize("steps", range(6))
def test_a_call_that_is_cancelled_as_the_server_stops_prints_no_traceback(
    steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def answer(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await released.wait()
            return request

        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Answer": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = channel.unary_unary("/test/Answer")
            call = ask(b"")
            await begun.wait()
            call.cancel()
            await server.stop(None)
        released.set()
        for _ in range(steps):
            await asyncio.sleep(0)

    asyncio.run(to_the_end(work()))
    assert "Traceback" not in capfd.readouterr().err


def test_a_task_that_is_left_running_is_cancelled() -> None:
    left: list[asyncio.Task[bool]] = []

    async def work() -> None:
        left.append(asyncio.ensure_future(asyncio.Event().wait()))

    asyncio.run(to_the_end(work()))
    assert left[0].cancelled()
