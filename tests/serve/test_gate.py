"""The gate bounds how much of a user's traffic is passed on to grpcio: the number of waiting calls, and the
share of the time of the event loop and of grpcio's threads.
"""

import asyncio
import contextlib
import gc
import socket
import weakref

from hypothesis import given
from hypothesis import strategies as st

from tests.clock import run
from vgpud.serve.gate import _TIME_AT_ONCE_SECONDS as TIME_AT_ONCE_SECONDS
from vgpud.serve.gate import _TIME_SHARE as TIME_SHARE
from vgpud.serve.gate import FRAME_SECONDS, MOST_QUEUED, FrameCounter, Gate
from vgpud.serve.pump import _CHUNK_BYTES as CHUNK_BYTES
from vgpud.serve.pump import Pump

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = 1
PING = (8).to_bytes(3, "big") + b"\x06" + bytes(5) + b"12345678"
frames = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=12)


@given(frames=frames, cuts=st.lists(st.integers(1, 60), min_size=1))
def test_http_2_streams_and_frames_are_counted_however_the_bytes_are_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    sent = PREFACE + b"".join(
        len(payload).to_bytes(3, "big") + bytes([kind]) + bytes(5) + payload for kind, payload in frames
    )
    counter, streams, counted, at = FrameCounter(), 0, 0, 0
    while at < len(sent):
        for cut in cuts:
            opened, ended = counter.count(memoryview(sent[at : at + cut]))
            streams, counted, at = streams + opened, counted + ended, at + cut
    assert streams == sum(kind == HEADERS for kind, _ in frames)
    assert counted == len(frames)


def test_a_users_connections_are_not_read_while_too_many_of_its_calls_wait() -> None:
    async def main() -> None:
        gate, resumed = Gate(), []
        gate.passed(MOST_QUEUED, 0.0)
        assert not gate.is_open
        gate.wait(lambda: resumed.append("first"))
        gate.wait(lambda: resumed.append("second"))
        gate.taken()
        # waiting connections are resumed one at a time, and the gate is checked before each
        assert gate.is_open and resumed == ["first"]
        await asyncio.sleep(0.02)
        assert resumed == ["first", "second"]

    run(main())


def test_a_call_that_grpc_never_takes_stops_the_reading_of_its_user_for_a_bounded_time() -> None:
    async def main() -> None:
        gate = Gate()
        gate.passed(1000, 0.0)
        assert not gate.is_open
        await asyncio.sleep(1.1)
        assert gate.is_open

    run(main())


def test_processing_a_users_bytes_takes_a_bounded_share_of_the_event_loops_time() -> None:
    async def main() -> None:
        gate, root = Gate(), Gate(always_open=True)
        for one in (gate, root):
            one.passed(0, 0.1)
        assert root.is_open and not gate.is_open
        await asyncio.sleep(0.3)
        assert not gate.is_open
        await asyncio.sleep(0.3)
        assert gate.is_open

    run(main())


def test_http_2_frames_of_all_connections_of_a_user_are_passed_on_at_a_bounded_rate() -> None:
    """Without the bound, 60 connections that send 200 000 PINGs in a second keep grpcio's threads busy, and a
    call of root fails after 20 s.
    """

    async def main() -> None:
        loop, gate, sent, passed = asyncio.get_running_loop(), Gate(), 0, 0
        ends = [(*socket.socketpair(), *socket.socketpair()) for _ in range(4)]
        for near, near_inner, far_inner, far in ends:
            for end in (near, near_inner, far_inner, far):
                end.setblocking(False)
            sent += near.send(PREFACE + PING * 10_000)
        pumps = [Pump(loop, inner, far_inner, gate, lambda: None) for _, inner, far_inner, _ in ends]
        await asyncio.sleep(1)
        for pump, (near, _, _, far) in zip(pumps, ends, strict=True):
            pump.close()
            near.close()
            with far, contextlib.suppress(BlockingIOError):
                while part := far.recv(1 << 20):
                    passed += len(part)
        most = (TIME_SHARE + TIME_AT_ONCE_SECONDS) / FRAME_SECONDS * len(PING) + CHUNK_BYTES
        assert 0 < passed <= most < sent / 2

    run(main())


def test_a_user_that_reconnects_keeps_the_pause_that_its_earlier_connections_caused() -> None:
    async def main() -> None:
        gate = Gate()
        kept = weakref.ref(gate)
        gate.passed(0, 0.1)
        del gate
        gc.collect()
        assert kept() is not None
        await asyncio.sleep(1)
        gc.collect()
        assert kept() is None

    run(main())
