"""Claims whose devices cannot be one allocation: the reason that the kubelet gets."""

from typing import Any

import pytest

from tests.planner.cards import H200_PROFILES, h200
from vgpud.model.device import Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.serve.dra.cards import Form, Place, Target
from vgpud.serve.dra.claims import parts_of
from vgpud.serve.dra.slices import DRIVER

TARGETS = {
    "one": Target(h200(0), Form.QUOTA),
    "other": Target(h200(1), Form.QUOTA),
    "whole": Target(h200(2), Form.CARD),
    "first half": Target(h200(3), Form.MIG, Place(H200_PROFILES[0], "3g.71gb", Placement(0, 4))),
    "second half": Target(h200(3), Form.MIG, Place(H200_PROFILES[0], "3g.71gb", Placement(4, 4))),
}


def result(device: str, pool: str = "node-1", **consumed: str) -> dict[str, Any]:
    return {"driver": DRIVER, "request": "gpu", "pool": pool, "device": device, "consumedCapacity": consumed}


def config(**body: Any) -> dict[str, Any]:
    whole = {"apiVersion": "vgpud.io/v1", "kind": "VgpuConfig", **body}
    return {"source": "FromClaim", "requests": [], "opaque": {"driver": DRIVER, "parameters": whole}}


@pytest.mark.parametrize(
    ("results", "configs", "code", "sentence"),
    [
        (
            [result("one", "node-2")],
            [],
            ErrorCode.BAD_REQUEST,
            "claim ml/a has devices of pool node-2, and this node is node-1",
        ),
        (
            [result("one"), result("whole")],
            [],
            ErrorCode.BAD_REQUEST,
            "request gpu was given devices of type card and quota",
        ),
        (
            [result("whole")],
            [config(memory="1GiB")],
            ErrorCode.BAD_REQUEST,
            "request gpu sets memory or cores, which devices of type card have fixed",
        ),
        (
            [result("first half"), result("second half")],
            [],
            ErrorCode.UNSUPPORTED,
            "request gpu was given 2 MIG instances, and a CUDA program uses one",
        ),
        (
            [result("one", memory="1Gi"), result("other", memory="2Gi")],
            [],
            ErrorCode.BAD_REQUEST,
            "request gpu has different amounts of memory (1GiB and 2GiB) on its cards",
        ),
        (
            [result("one", memory="1Gi", cores="10"), result("other", memory="1Gi", cores="20")],
            [],
            ErrorCode.BAD_REQUEST,
            "request gpu has different shares of cores on its cards",
        ),
        (
            [result("one", memory="1Gi", cores="10")],
            [config(cores=20)],
            ErrorCode.BAD_REQUEST,
            "request gpu sets cores to 20%, and 10% were allocated to it",
        ),
    ],
    ids=["pool", "types", "fixed", "instances", "memory", "cores", "more cores"],
)
def test_a_claim_that_is_not_one_kind_of_slice_is_refused_with_the_reason(
    results: list[dict[str, Any]], configs: list[dict[str, Any]], code: ErrorCode, sentence: str
) -> None:
    claim = {
        "metadata": {"namespace": "ml", "name": "a", "uid": "u"},
        "status": {"allocation": {"devices": {"results": results, "config": configs}}},
    }
    with pytest.raises(VgpuError) as raised:
        parts_of(claim, "u", "node-1", TARGETS.get)
    assert (raised.value.code, raised.value.sentence) == (code, sentence)


def test_cards_without_consumable_capacity_have_all_memory_or_what_the_claim_sets() -> None:
    claim = {
        "metadata": {"namespace": "ml", "name": "a", "uid": "u"},
        "status": {"allocation": {"devices": {"results": [result("one"), result("other")]}}},
    }
    ((part,), _) = parts_of(claim, "u", "node-1", TARGETS.get)
    assert part.request.memory_bytes == h200(0).memory_usable_bytes
    claim["status"]["allocation"]["devices"]["config"] = [config(memory="3GiB")]  # type: ignore[index]
    ((part,), _) = parts_of(claim, "u", "node-1", TARGETS.get)
    assert (part.request.memory_bytes, part.request.count) == (3 << 30, 2)
