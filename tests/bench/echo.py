"""A baseline: a grpcio server that returns what it receives. `python -m tests.bench.echo SOCKET`."""

import asyncio
import sys

import grpc

SERVICE = "bench.Echo"
METHOD = f"/{SERVICE}/Say"


async def _say(request: bytes, _: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    return request


async def serve(socket: str) -> None:
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_say)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Say": handler}),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
