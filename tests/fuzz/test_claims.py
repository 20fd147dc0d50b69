"""DRA claims as an API server sends them. Whatever the JSON is, the parser returns the claim's parts or a
numbered error.
"""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.dra.claims import parts_of
from vgpud.serve.dra.slices import DRIVER

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=6)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
RESULT = st.fixed_dictionaries(
    {"driver": st.just(DRIVER) | SCALARS},
    optional={
        "request": st.text(max_size=5) | ANY_JSON,
        "pool": st.just("node-1") | ANY_JSON,
        "device": st.text(max_size=5) | ANY_JSON,
        "adminAccess": SCALARS,
        "consumedCapacity": ANY_JSON,
    },
)
DEVICES = st.fixed_dictionaries(
    {}, optional={"results": st.lists(RESULT | ANY_JSON, max_size=3) | ANY_JSON, "config": ANY_JSON}
)
CLAIMS = st.fixed_dictionaries(
    {"metadata": st.just({"uid": "u1", "namespace": "n", "name": "c"}) | ANY_JSON},
    optional={"status": st.fixed_dictionaries({"allocation": st.fixed_dictionaries({"devices": DEVICES})})},
)


def no_device(name: str) -> Any:
    raise VgpuError(ErrorCode.NO_SUCH_DEVICE, f"no device {name[:20]!r} is published", "look again")


@given(CLAIMS | ANY_JSON)
@example({"metadata": {"uid": "u1"}, "status": {"allocation": {"devices": {"results": [3]}}}})
@example(
    {"metadata": {"uid": "u1"}, "status": {"allocation": {"devices": {"results": [{"driver": DRIVER}]}}}}
)
@example([])
def test_any_claim_is_understood_or_refused(claim: Any) -> None:
    check_claim(claim)


def check_claim(claim: Any) -> None:
    try:
        parts = parts_of(claim, "u1", "node-1", no_device)
    except VgpuError as error:
        assert error.code is not ErrorCode.BUG
        assert len(str(error)) < 1100
    else:
        assert parts == ((), ())
