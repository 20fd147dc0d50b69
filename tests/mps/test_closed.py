"""Devices that are closed to a request: the planner's treatment of them, and the requests that may use an MPS
device.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.node.world import device
from vgpud.model.device import Node
from vgpud.model.errors import ErrorCode
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Isolation, Mode, Owner, Request, Slice, State
from vgpud.modes.base import Paths
from vgpud.modes.mps import MpsMode, MpsRules, MpsWorld, Users
from vgpud.modes.mps.features import Features
from vgpud.planner.choose import choose
from vgpud.planner.refuse import refuse
from vgpud.planner.verdict import Unfit
from vgpud.planner.wanted import Wanted
from vgpud.policy.model import Policy

NODE = Node(devices=(device(0), device(1)))
REQUEST = Request("r", Owner(1, 1), GIB, Percent(1000), isolation=Isolation.COMPUTE)


def test_a_closed_device_is_not_chosen_and_the_decision_names_the_reason() -> None:
    decision = choose(REQUEST, NODE, Policy(), {}, closed={"GPU-00000000": "it is drained"})
    assert [part.device_uuid for part in decision.slices] == ["GPU-00000001"]
    assert decision.reasons[0].sentence == "it is drained"


def test_a_request_with_all_devices_closed_is_refused_for_want_of_capacity() -> None:
    shut = {one.uuid: "it is drained" for one in NODE.devices}
    refusal = choose(REQUEST, NODE, Policy(), {}, closed=shut).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.NO_CAPACITY
    assert all("it is drained" in line for line in refusal.details)
    told = "device 0 accepts no such request now: it is drained (and 1 device more closed)"
    assert refusal.sentence == told
    assert refusal.hint == "'vgpuctl undrain 0' opens it, or allow other devices"


def test_a_refusal_counts_all_closed_devices_whatever_their_mode() -> None:
    shut = [
        Unfit(device(i), mode, True, ErrorCode.NO_CAPACITY, "it is drained", closed=True)
        for i, mode in enumerate((Mode.MPS, Mode.MPS, Mode.PRELOAD))
    ]
    refusal = refuse(Wanted((Mode.MPS, Mode.PRELOAD), GIB, None, 1, ""), shut, ())
    assert refusal.sentence.endswith("it is drained (and 2 devices more closed)")


def test_an_impossible_request_is_reported_before_a_closed_device() -> None:
    asked = replace(REQUEST, memory_bytes=800 * GIB)
    shut = {one.uuid: "it is drained" for one in NODE.devices}
    refusal = choose(asked, NODE, Policy(), {}, closed=shut).refusal
    assert refusal is not None
    assert refusal.code is ErrorCode.IMPOSSIBLE


def held(name: str, uid: int) -> Allocation:
    part = Slice("GPU-00000000", Mode.MPS, GIB, Percent(1000))
    return Allocation(name, replace(REQUEST, id=name, owner=Owner(uid, uid)), State.ACTIVE, (part,))


Closed = Callable[..., str | None]


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Closed:
    def ask(uid: int, *allocations: Allocation, rules: MpsRules | None = None, but: str = "") -> str | None:
        def nothing(*_: object) -> None:
            return None

        world = MpsWorld(lambda _: allocations, lambda _: rules or MpsRules(), nothing, nothing, None)  # type: ignore[arg-type]
        paths = Paths(tmp_path, tmp_path, tmp_path, tmp_path)
        mode = MpsMode(None, None, world, paths, None)  # type: ignore[arg-type]
        monkeypatch.setattr(mode, "features", Features)
        return mode.closed_to(uid, device(0), device(0).uuid, but)

    return ask


def test_the_policy_decides_which_users_share_an_mps_device(closed: Closed) -> None:
    assert closed(1) is None
    assert closed(1, held("a", 1)) is None
    assert closed(2, held("a", 1), held("b", 3)) == (
        "its MPS server serves uid 1, 3, and uid 2 would wait until all their programs end"
    )
    assert closed(2, held("a", 2), held("mine", 3), but="mine") is None
    assert closed(2, held("a", 1), rules=MpsRules(users=Users.QUEUE)) is None
    assert closed(2, held("a", 1), rules=MpsRules(users=Users.MULTI)), "this daemon is not multi-user"


def test_the_number_of_mps_allocations_stays_below_the_drivers_client_limit(closed: Closed) -> None:
    many = [held(str(number), 1) for number in range(12)]
    assert closed(1, *many[:11], rules=MpsRules(processes_per_tenant=4)) is None
    assert closed(1, *many, rules=MpsRules(processes_per_tenant=4)) == (
        "its MPS server takes 48 processes, and 12 tenants may have 4 each"
    )


@pytest.mark.parametrize(
    ("capable", "rules", "features", "why"),
    [
        (False, MpsRules(), Features(), "it does not support MPS"),
        (
            True,
            MpsRules(),
            Features(),
            "libvgpu-guard.so is missing, so a tenant could run past a dead control",
        ),
        (True, MpsRules(exclusive_process=True), Features(), "is missing, or too old to limit memory"),
        (
            True,
            MpsRules(exclusive_process=True, partitions=True),
            Features(memory_limits=True),
            "the device has no static SM partitions (branch 590, Ampere)",
        ),
    ],
    ids=["card", "guard", "program", "partitions"],
)
def test_a_device_that_mps_cannot_serve_is_refused_with_the_reason(
    tmp_path: Path, capable: bool, rules: MpsRules, features: Features, why: str
) -> None:
    world = MpsWorld(lambda _: (), lambda _: rules, None, None, None)  # type: ignore[arg-type]
    paths = Paths(tmp_path, tmp_path, tmp_path / "libvgpu.so", tmp_path)
    mode = MpsMode(None, None, world, paths, None)  # type: ignore[arg-type]
    mode.features = lambda: features  # type: ignore[method-assign]
    said = asyncio.run(mode.verify(replace(device(0), mps_capable=capable)))
    assert said is not None and why in said
