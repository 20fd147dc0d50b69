"""How much of a user's traffic is passed on to grpcio: a few waiting calls, and a share of the event loop's
time.
"""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.clock import run
from vgpud.serve.gate import MOST_QUEUED, Gate, StreamCounter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = 1
frames = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=12)


@given(frames=frames, cuts=st.lists(st.integers(1, 60), min_size=1))
def test_opened_streams_are_counted_however_the_bytes_are_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    sent = PREFACE + b"".join(
        len(payload).to_bytes(3, "big") + bytes([kind]) + bytes(5) + payload for kind, payload in frames
    )
    counter, counted, at = StreamCounter(), 0, 0
    while at < len(sent):
        for cut in cuts:
            counted += counter.count(memoryview(sent[at : at + cut]))
            at += cut
    assert counted == sum(kind == HEADERS for kind, _ in frames)


def test_a_gate_is_closed_while_calls_wait_to_be_taken() -> None:
    async def main() -> None:
        gate, resumed = Gate(), []
        gate.passed(MOST_QUEUED, 0.0)
        assert not gate.is_open
        gate.wait(lambda: resumed.append("first"))
        gate.wait(lambda: resumed.append("second"))
        gate.taken()
        # waiting callers are resumed one at a time, with a check of the gate before each
        assert gate.is_open and resumed == ["first"]
        await asyncio.sleep(0.02)
        assert resumed == ["first", "second"]

    run(main())


def test_a_call_that_is_never_taken_closes_the_gate_for_a_bounded_time() -> None:
    async def main() -> None:
        gate = Gate()
        gate.passed(1000, 0.0)
        assert not gate.is_open
        await asyncio.sleep(1.1)
        assert gate.is_open

    run(main())


def test_the_bytes_of_a_user_get_a_bounded_share_of_the_loops_time() -> None:
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
