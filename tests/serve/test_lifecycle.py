"""Clients that disconnect during a call, deadlines, many calls at once, and the stop of the server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from tests.e2e.support import eventually as wait_until
from tests.serve.live import Live
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent


def close_gate(live: Live) -> None:
    async def close() -> None:
        live.keeper.gate = asyncio.Event()

    live.do(close())


def open_gate(live: Live) -> None:
    gate = live.keeper.gate
    assert gate is not None
    live.loop.call_soon_threadsafe(gate.set)


ALLOCATE = """
import sys
from pathlib import Path
from vgpud.api.client import Client
from vgpud.api.gen import vgpud_pb2 as pb
Client(Path(sys.argv[1]), 300).allocate(pb.AllocateRequest(request_id=sys.argv[2]))
"""


@pytest.mark.parametrize("request_id", ["mine", ""])
def test_a_call_of_a_killed_client_leaves_the_server_unharmed(
    live: Live, tenant: Client, request_id: str
) -> None:
    """The client is killed during Allocate. With a request id the allocation is completed, and a later call
    finds it. Without a request id no allocation is left.
    """
    close_gate(live)
    caller = subprocess.Popen([sys.executable, "-c", ALLOCATE, str(live.tenant), request_id])
    wait_until(lambda: len(live.keeper.requests) == 1)
    with capture_logs() as lines:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        wait_until(lambda: LogEvent.CALLER_DISCONNECTED_CALL_CONTINUES in [line["event"] for line in lines])
    assert live.keeper.held == {}
    open_gate(live)
    if request_id:
        wait_until(lambda: len(live.keeper.held) == 1)
        assert tenant.allocate(pb.AllocateRequest(request_id=request_id)).id == "a1"
        assert len(live.keeper.held) == 1
    else:
        wait_until(lambda: len(live.keeper.events) == 2)
        assert live.keeper.held == {}


def test_the_deadline_of_a_caller_ends_its_call_and_not_the_allocation(live: Live) -> None:
    close_gate(live)
    deadline_seconds = 0.1
    while not live.keeper.requests:  # on a busy machine the deadline may pass before the call arrives
        deadline_seconds *= 2
        with Client(live.tenant, deadline_seconds) as hasty, pytest.raises(VgpuError) as caught:
            hasty.allocate(pb.AllocateRequest(request_id="r"))
        assert caught.value.code is ErrorCode.DEADLINE
        assert f"{deadline_seconds:g} s" in caught.value.sentence
    open_gate(live)
    wait_until(lambda: len(live.keeper.held) == 1)
    with Client(live.tenant, 300) as client:
        assert client.allocate(pb.AllocateRequest(request_id="r")).id == "a1"


def test_two_hundred_concurrent_callers_are_served(live: Live) -> None:
    ready = threading.Barrier(20)

    def caller(number: int) -> list[str]:
        made = []
        ready.wait()
        for i in range(10):
            # a subchannel pool of its own gives each client its own connection
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels.append(grpc.insecure_channel(f"unix:{live.tenant}", options=options))
            call = channels[-1].unary_unary(
                "/vgpud.v1.Vgpud/Allocate",
                request_serializer=pb.AllocateRequest.SerializeToString,
                response_deserializer=pb.Allocation.FromString,
            )
            made.append(call(pb.AllocateRequest(request_id=f"{number}-{i}"), timeout=300).request_id)
        return made

    channels: list[grpc.Channel] = []
    with ThreadPoolExecutor(20) as pool:
        answered = [name for names in pool.map(caller, range(20)) for name in names]
    assert answered == [f"{number}-{i}" for number in range(20) for i in range(10)]
    assert len(live.keeper.held) == 200
    assert live.server.relay.peers.served == 200
    for channel in channels:
        channel.close()
    wait_until(lambda: live.server.relay.peers.served == 0)
    assert [p.name for p in (live.run_dir / "private").iterdir()] == ["grpc.sock"]


@pytest.mark.parametrize(
    "junk",
    [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff"],
    # fixed names of the parameters; pytest would name the random bytes differently in each worker
    ids=["nothing", "http", "noise", "http2"],
)
def test_bytes_that_are_no_http_2_on_the_socket_leave_other_clients_unharmed(
    live: Live, reader: Client, junk: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(str(live.ro))
        odd.settimeout(300)
        try:
            odd.sendall(junk)
            odd.shutdown(socket.SHUT_WR)
            while odd.recv(65536):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert reader.get_node().status == "well"
    wait_until(lambda: live.server.relay.peers.served == 1)


def test_a_stop_of_the_server_waits_for_running_calls(live: Live, reader: Client) -> None:
    """During a stop the running call is answered, the watch ends with an error, and new connections are
    refused.
    """
    close_gate(live)
    watch = reader.watch()
    with ThreadPoolExecutor(2) as pool, Client(live.tenant, 300) as client:
        answer = pool.submit(client.allocate, pb.AllocateRequest(request_id="r"))
        wait_until(lambda: len(live.keeper.requests) == 1)
        ending = live.begin(live.server.stop(20))
        with pytest.raises(VgpuError) as caught:
            next(watch)
        assert caught.value.code is ErrorCode.STOPPING
        assert not ending.done()
        assert not live.ro.exists()
        with pytest.raises(VgpuError) as caught, Client(live.admin) as late:
            late.get_node()
        assert caught.value.code is ErrorCode.UNREACHABLE
        open_gate(live)
        assert answer.result(20).id == "a1"
        ending.result(20)
    live.stopped = True


def test_a_stop_of_the_server_cancels_calls_that_exceed_the_grace_period(live: Live) -> None:
    close_gate(live)
    with ThreadPoolExecutor(1) as pool, Client(live.tenant, 300) as client:
        answer = pool.submit(client.allocate, pb.AllocateRequest(request_id="r"))
        wait_until(lambda: len(live.keeper.requests) == 1)
        live.stop(0.3)
        with pytest.raises(VgpuError) as caught:
            answer.result(20)
        assert caught.value.code in (ErrorCode.STOPPING, ErrorCode.UNREACHABLE)
    assert live.do(others()) == []  # none of the server's tasks still waits for an answer
    open_gate(live)


async def others() -> list[str]:
    return [str(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]


def test_the_health_service_reports_that_vgpud_stops(live: Live) -> None:
    with grpc.insecure_channel(f"unix:{live.ro}") as channel:
        # typed as Any, because the stubs of grpc_health have no typed methods
        stub: Any = health_pb2_grpc.HealthStub(channel)
        states = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        ending = live.begin(live.server.stop(0.5))
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        ending.result(20)
    live.stopped = True
