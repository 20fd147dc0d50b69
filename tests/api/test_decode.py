"""Requests as clients send them: which are decoded exactly, and which are refused."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpud.api import decode
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import MAX_BYTES, Percent
from vgpud.model.tenancy import Isolation, Lifetime, Owner, Request, Selector

OWNER = Owner(1000, 100)


def decoded(asked: pb.AllocateRequest, request_id: str = "r1") -> Request:
    # encodes and decodes the request, as for a real caller
    asked = pb.AllocateRequest.FromString(asked.SerializeToString())
    return decode.request(asked, request_id, OWNER, Lifetime(5, 6))


def refused(asked: pb.AllocateRequest, request_id: str = "r1") -> VgpuError:
    with pytest.raises(VgpuError) as caught:
        decoded(asked, request_id)
    assert caught.value.hint
    return caught.value


def test_an_empty_request_asks_for_one_whole_device() -> None:
    assert decoded(pb.AllocateRequest()) == Request("r1", OWNER, lifetime=Lifetime(5, 6))
    assert decoded(pb.AllocateRequest()).whole_device


def test_every_field_of_a_request_is_decoded() -> None:
    asked = pb.AllocateRequest(
        request_id="not this one",
        memory_bytes=2**31 + 1,
        share_percent=12.34,
        count=64,
        isolation="quota",
        mig_profile="1g.18gb+me",
        selector=pb.Selector(uuids=["GPU-1"], indices=[0, 7], name_glob="NVIDIA*"),
        label="für Ünal",
        owner_uid=0,
        owner_gid=0,
    )
    assert decoded(asked) == Request(
        id="r1",
        owner=OWNER,
        memory_bytes=2**31 + 1,
        share=Percent(1234),
        count=64,
        isolation=Isolation.QUOTA,
        mig_profile="1g.18gb+me",
        selector=Selector(("GPU-1",), (0, 7), "NVIDIA*"),
        label="für Ünal",
        lifetime=Lifetime(5, 6),
    )


@given(st.integers(1, 10000))
def test_a_share_is_exact_over_the_wire(hundredths: int) -> None:
    asked = pb.AllocateRequest(share_percent=Percent(hundredths).value)
    assert decoded(asked).share == Percent(hundredths)


@given(st.integers(1, MAX_BYTES))
def test_memory_is_exact_over_the_wire(count: int) -> None:
    assert decoded(pb.AllocateRequest(memory_bytes=count)).memory_bytes == count


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_share_of_at_most_two_decimals_is_accepted_and_any_other_double_is_refused(value: float) -> None:
    try:
        share = decoded(pb.AllocateRequest(share_percent=value)).share
    except VgpuError as error:
        assert error.code is ErrorCode.BAD_PERCENT
        return
    assert share is not None
    assert share.value == value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.009, 12.345, 100.01, 1e300]
)
def test_impossible_shares_are_refused(value: float) -> None:
    assert refused(pb.AllocateRequest(share_percent=value)).code is ErrorCode.BAD_PERCENT


@pytest.mark.parametrize("value", [0, MAX_BYTES + 1, 2**64 - 1])
def test_impossible_amounts_of_memory_are_refused(value: int) -> None:
    assert refused(pb.AllocateRequest(memory_bytes=value)).code is ErrorCode.BAD_QUANTITY


@pytest.mark.parametrize(
    ("asked", "figure"),
    [
        (pb.AllocateRequest(count=65), "65"),
        (pb.AllocateRequest(count=2**32 - 1), "4294967295"),
        (pb.AllocateRequest(isolation="Hardware"), "'Hardware'"),
        (pb.AllocateRequest(isolation="x" * 10000), "xxx"),
        (pb.AllocateRequest(label="x" * 257), "257"),
        (pb.AllocateRequest(label="a\nb"), r"a\nb"),
        (pb.AllocateRequest(mig_profile="\x1b[31m"), "mig_profile"),
        (pb.AllocateRequest(selector=pb.Selector(uuids=["G"] * 65)), "65"),
        (pb.AllocateRequest(selector=pb.Selector(indices=[0] * 66)), "66"),
        (pb.AllocateRequest(selector=pb.Selector(uuids=["G" * 300])), "300"),
        (pb.AllocateRequest(selector=pb.Selector(name_glob="*" * 257)), "257"),
    ],
)
def test_requests_with_invalid_values_are_refused_and_the_error_has_the_figures(
    asked: pb.AllocateRequest, figure: str
) -> None:
    error = refused(asked)
    assert error.code is ErrorCode.BAD_REQUEST
    assert figure in error.sentence
    assert len(error.sentence) < 400


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\x00b", "a\nb"])
def test_an_empty_long_or_unprintable_request_id_is_refused(request_id: str) -> None:
    assert refused(pb.AllocateRequest(), request_id).code is ErrorCode.BAD_REQUEST


def test_texts_of_the_maximum_length_are_accepted() -> None:
    assert len(decoded(pb.AllocateRequest(label="x" * 256), "y" * 128).label) == 256


@pytest.mark.parametrize(
    "data",
    [
        b"\x98\x06\x01",  # unknown field 99, a varint of 1
        pb.AllocateRequest(selector=pb.Selector()).SerializeToString()[:-1] + b"\x03\x98\x06\x01",
    ],
)
def test_a_field_of_a_newer_version_is_refused(data: bytes) -> None:
    with pytest.raises(VgpuError, match="number 99") as caught:
        decode.request(pb.AllocateRequest.FromString(data), "r", OWNER, Lifetime())
    assert caught.value.code is ErrorCode.BAD_REQUEST


def test_a_resize_needs_at_least_one_new_limit() -> None:
    both = decode.limits(pb.ResizeRequest(memory_bytes=7, share_percent=0.01))
    assert both == decode.ResizeLimits(7, Percent(1))
    assert decode.limits(pb.ResizeRequest(memory_bytes=7)).share is None
    with pytest.raises(VgpuError) as caught:
        decode.limits(pb.ResizeRequest(allocation_id="a"))
    assert caught.value.code is ErrorCode.BAD_REQUEST
    with pytest.raises(VgpuError):
        decode.limits(pb.ResizeRequest(memory_bytes=0, share_percent=10))


def test_an_owner_has_both_uid_and_gid_or_is_refused() -> None:
    assert decode.named_owner(pb.AllocateRequest()) is None
    assert decode.named_owner(pb.AllocateRequest(owner_uid=0, owner_gid=0)) == Owner(0, 0)
    for asked in (
        pb.AllocateRequest(owner_uid=5),
        pb.AllocateRequest(owner_gid=5),
        pb.AllocateRequest(owner_uid=2**32 - 1, owner_gid=0),
    ):
        with pytest.raises(VgpuError) as caught:
            decode.named_owner(asked)
        assert caught.value.code is ErrorCode.BAD_REQUEST


def test_only_a_few_of_many_unknown_fields_of_a_request_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may contain 40 000 unknown fields, and vgpud decodes it on the event loop."""
    looked: list[int] = []

    class Many:
        def __init__(self, asked: object) -> None: ...

        def __len__(self) -> int:
            return 40_000

        def __getitem__(self, index: int) -> SimpleNamespace:
            looked.append(index)
            return SimpleNamespace(field_number=1000 + index)

    monkeypatch.setattr(decode, "UnknownFieldSet", Many)
    assert "number 1000, 1001" in refused(pb.AllocateRequest()).sentence
    assert len(looked) <= 8
