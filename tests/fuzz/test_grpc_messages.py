"""gRPC requests made from their schema and from random bytes. Each is answered, or refused with a numbered
error.
"""

import asyncio
from typing import Any, cast

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given
from hypothesis import strategies as st

from tests.serve.fake_keeper import FakeKeeper
from vgpud.api.status import to_status
from vgpud.model.caller import Caller, Door
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Lifetime, Owner
from vgpud.node.keeper import NodeKeeper
from vgpud.serve.calls import SERVICE, parse
from vgpud.serve.handlers import HANDLERS

ROOT = Caller(Door.ADMIN, 0, 0, Lifetime())
USER = Caller(Door.TENANT, 100_001, 100_001, Lifetime(), Owner(1000, 1000))
TEXTS = st.text(max_size=12) | st.sampled_from(["\0", "a" * 5000, "GPU-1", "all", "1g.18gb*2", "\x1b[2J"])
_INTEGERS = (
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
)
_BITS = {FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_INT64: 63}
SIGNED = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64}


def value_of(draw: st.DrawFn, field: Any, depth: int) -> Any:
    if field.message_type is not None:
        return message_of(draw, GetMessageClass(field.message_type), depth + 1)
    if field.type in _INTEGERS:
        most = 2 ** _BITS.get(field.type, 64) - 1
        least = -most - 1 if field.type in SIGNED else 0
        return draw(st.integers(least, most) | st.sampled_from([0, 1, most]))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw(st.booleans())
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw(st.floats(width=32))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw(st.integers(-1, 9))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.binary(max_size=20))
    return draw(TEXTS)


def message_of(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """A message with random fields and values of the right types."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if depth > 3 or not draw(st.booleans()):
            continue
        if field.is_repeated and field.message_type is not None:
            for _ in range(draw(st.integers(0, 3))):
                getattr(made, field.name).add().CopyFrom(value_of(draw, field, depth))
        elif field.is_repeated:
            getattr(made, field.name).extend(value_of(draw, field, depth) for _ in range(3))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(value_of(draw, field, depth))
        else:
            setattr(made, field.name, value_of(draw, field, depth))
    return made


@st.composite
def requests(draw: st.DrawFn, kind: type[Message]) -> bytes:
    data = bytearray(message_of(draw, kind).SerializeToString())
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def answered(name: str, data: bytes) -> None:
    kind = GetMessageClass(SERVICE.methods_by_name[name].input_type)
    for caller in (ROOT, USER):

        async def call(caller: Caller = caller) -> None:
            reply = await HANDLERS[name](cast(NodeKeeper, FakeKeeper()), caller, parse(kind, data))
            assert isinstance(reply.SerializeToString(), bytes)

        try:
            asyncio.run(call())
        except VgpuError as refusal:
            assert refusal.code is not ErrorCode.BUG
            assert len(refusal.sentence) < 1100
            to_status(refusal)


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_any_request_is_answered_or_refused(name: str) -> None:
    kind = GetMessageClass(SERVICE.methods_by_name[name].input_type)

    @given(requests(kind) | st.binary(max_size=60))
    @example(b"\xff" * 50)
    @example(b"")
    def one(data: bytes) -> None:
        answered(name, data)

    one()
