"""MIG mode and instances that cannot be changed or requested: the reasons, and what stays on the device."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.mig.cutting import UUID, Card, Disk, Node1, run, whole_of
from tests.planner.cards import h200
from vgpud.model.device import DeviceProcess, GpuInstance, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.tenancy import Allocation, MigSlice, Mode, Owner, Request, Slice, State
from vgpud.modes.mig import ORIGINAL_KEY, MigMode
from vgpud.node.room import Room
from vgpud.planner.geometry import SlotKey
from vgpud.policy.model import Policy

HALF: SlotKey = (9, Placement(4, 4))
OTHER: SlotKey = (9, Placement(0, 4))
FIRST, SECOND = (0, Placement(0, 1)), (0, Placement(1, 1))
OF_HALF = ("GPU-0", "9@4:4", "")
OFF = (UUID, ORIGINAL_KEY, "off")


@dataclass
class Stubborn(Card):
    """A device that does not switch MIG mode, fails to create instances, or forgets compute instances."""

    switches: bool | VgpuError = True
    error: VgpuError | None = None
    forgets: bool = False
    users: tuple[DeviceProcess, ...] = ()

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        return self.users

    def set_mig_mode(self, uuid: str, enabled: bool) -> bool:
        if isinstance(self.switches, VgpuError):
            raise self.switches
        return super().set_mig_mode(uuid, enabled) and self.switches

    def create_gpu_instance(
        self, uuid: str, profile_id: int, placement: Placement, whole: bool = True
    ) -> GpuInstance:
        if self.error is not None:
            raise self.error
        return super().create_gpu_instance(uuid, profile_id, placement, whole)

    def create_compute_instance(self, uuid: str, gpu_instance_id: int, key: SlotKey) -> GpuInstance:
        made = super().create_compute_instance(uuid, gpu_instance_id, key)
        return replace(made, compute_instances=()) if self.forgets else made


def on(card: Card, disk: Disk) -> MigMode:
    return Node1(card, disk).mig


def refused(work: Awaitable[object]) -> VgpuError:
    async def wait() -> None:
        await work

    with pytest.raises(VgpuError) as raised:
        run(wait())
    return raised.value


def test_a_device_that_cannot_enter_mig_mode_is_refused_with_the_reason() -> None:
    card = Stubborn(users=(DeviceProcess(os.getpid(), None, "compute"),))
    device = h200(0)
    without = replace(device, mig=replace(device.mig, capable=False))
    assert run(on(card, Disk()).verify(without)) == "it cannot be partitioned by MIG"
    said = run(on(card, Disk()).verify(card.snapshot().devices[0]))
    assert said is not None
    assert said.startswith(f"it is used by 1 process, and MIG mode needs it idle (pid {os.getpid()} (")
    card.users = ()
    assert run(on(card, Disk()).verify(card.snapshot().devices[0])) is None


@pytest.mark.parametrize(
    ("switches", "code"),
    [
        (VgpuError(ErrorCode.DEVICE_IN_USE, "the device is in use", ""), ErrorCode.DEVICE_IN_USE),
        (False, ErrorCode.RESET_NEEDED),
    ],
)
def test_mig_mode_that_the_driver_does_not_enable_leaves_no_record(
    switches: bool | VgpuError, code: ErrorCode
) -> None:
    card, disk = Stubborn(switches=switches), Disk()
    assert refused(on(card, disk).apply(card.snapshot().devices[0])).code is code
    assert (card.mode, disk.originals) == (False, [])


def test_mig_mode_is_disabled_on_request_unless_that_needs_a_reset() -> None:
    card, disk = Stubborn(mode=True, switches=False), Disk()
    disk.modes.kept[OFF[:2]] = OFF
    error = refused(on(card, disk).switch_off(UUID))
    assert error.code is ErrorCode.RESET_NEEDED and "mig.reset = true" in error.hint
    assert (card.mode, disk.originals) == (True, [OFF])
    card.switches = True
    run(on(card, disk).switch_off(UUID))
    assert (card.mode, disk.originals) == (False, [])


def test_a_restored_device_keeps_mig_mode_as_long_as_it_has_foreign_instances() -> None:
    card, disk = Card(mode=True), Disk()
    disk.modes.kept[OFF[:2]] = OFF
    run(on(card, disk).make_part(UUID, (HALF, FIRST)))
    card.place([OTHER])
    run(on(card, disk).restore(UUID))
    assert (card.keys(), card.mode, disk.originals) == ({OTHER}, True, [OFF])
    card.instances.clear()
    run(on(card, disk).restore(UUID))
    assert (card.mode, disk.originals) == (False, [])


def _whole(card: Card) -> None:
    card.place([HALF])


def _divided(card: Card) -> None:
    card.place_parts(HALF, [FIRST])


@pytest.mark.parametrize(
    ("place", "recorded", "make"),
    [
        (_whole, (), lambda mig: mig.make(UUID, HALF)),
        (_divided, (OF_HALF,), lambda mig: mig.make(UUID, HALF)),
        (_divided, (OF_HALF,), lambda mig: mig.make_part(UUID, (HALF, FIRST))),
        (_whole, (), lambda mig: mig.make_part(UUID, (HALF, FIRST))),
        (_divided, (), lambda mig: mig.make_part(UUID, (HALF, SECOND))),
    ],
    ids=["whole", "divided", "part", "part of a whole one", "part beside another"],
)
def test_an_instance_that_another_program_made_is_not_used(
    place: Callable[[Card], None],
    recorded: tuple[tuple[str, ...], ...],
    make: Callable[[MigMode], Awaitable[object]],
) -> None:
    card, disk = Card(), Disk().note(*recorded)
    place(card)
    error = refused(make(on(card, disk)))
    assert error.code is ErrorCode.DEVICE_IN_USE
    assert error.sentence.startswith(
        "the instance of profile 9 at memory slice 4 of device GPU-0 was made by"
    )
    assert (card.touched, card.touched_parts, disk.originals) == ([], [], list(recorded))


def test_an_instance_that_another_program_made_is_not_destroyed() -> None:
    card, disk = Card(), Disk()
    card.place([OTHER])
    card.place_parts(HALF, [FIRST])
    mig = on(card, disk)
    assert not run(mig.unmake(UUID, OTHER)) and not run(mig.unmake_part(UUID, (HALF, FIRST)))
    assert card.keys() == {HALF, OTHER} and card.parts() == {(HALF, FIRST)}


def test_an_idle_undivided_instance_of_vgpud_is_replaced_by_a_divided_one() -> None:
    card, disk = Card(), Disk().note(OF_HALF)
    card.place([HALF])
    run(on(card, disk).make_part(UUID, (HALF, FIRST)))
    assert card.parts() == {(HALF, FIRST)}


@pytest.mark.parametrize("code", [ErrorCode.NVML_FAILED, ErrorCode.NVML_TIMEOUT])
@pytest.mark.parametrize("is_part", [False, True])
def test_only_an_instance_that_the_driver_may_still_make_stays_on_record(
    code: ErrorCode, is_part: bool
) -> None:
    card, disk = Stubborn(mode=True, error=VgpuError(code, "told to fail", "")), Disk()
    mig = on(card, disk)
    work: Awaitable[object] = mig.make_part(UUID, (HALF, FIRST)) if is_part else mig.make(UUID, HALF)
    assert refused(work).code is code
    assert disk.originals == ([OF_HALF] if code is ErrorCode.NVML_TIMEOUT else [])


def test_a_compute_instance_that_the_driver_does_not_list_is_an_error() -> None:
    error = refused(on(Stubborn(mode=True, forgets=True), Disk()).make_part(UUID, (HALF, FIRST)))
    assert error.code is ErrorCode.NVML_FAILED
    assert (
        "does not list the compute instance that was made at compute slice 0 of GPU instance 1"
        in error.sentence
    )


def tenant(*, part: SlotKey | None, uuid: str) -> Allocation:
    compute = {} if part is None else {"compute_profile_id": part[0], "compute_placement": part[1]}
    place = MigSlice(9, "3g.71gb", HALF[1], 1, 0, uuid, **compute)  # type: ignore[arg-type]
    piece = Slice(UUID, Mode.MIG, 1, mig=place)
    return Allocation("a", Request("a", Owner(1, 1)), State.ACTIVE, (piece,))


@pytest.mark.parametrize(
    ("standing", "part", "uuid", "stale"),
    [
        (None, None, "MIG-1-0", False),
        (whole_of(HALF), None, "MIG-0-9", True),
        (SECOND, FIRST, "MIG-1-0", False),
        (FIRST, FIRST, "MIG-0-9", True),
    ],
    ids=["gone", "another uuid", "part gone", "part of another uuid"],
)
def test_edits_are_stale_if_the_instance_was_made_anew_and_not_if_it_is_missing(
    standing: SlotKey | None, part: SlotKey | None, uuid: str, stale: bool
) -> None:
    card = Card(mode=True)
    if standing is not None:
        card.place_parts(HALF, [standing])
    held = tenant(part=part, uuid=uuid)
    device = card.snapshot().devices[0]
    assert run(on(card, Disk()).is_stale(held, held.slices[0], device)) is stale


def test_a_resize_of_a_mig_instance_is_refused_with_a_way_out() -> None:
    error = refused(on(Card(), Disk()).resize(tenant(part=None, uuid="")))
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.sentence == "allocation a holds MIG instances, whose size is fixed"
    assert error.hint == "allocate one of another profile and release this one"


@pytest.mark.parametrize(
    ("layout", "profiles", "found"),
    [
        (("3g.71gb@4", "1g.18gb@0"), None, {"3g.71gb": [4], "1g.18gb": [0]}),
        (("3g.71gb@4", "1g.18gb@0"), ["1g.18gb"], {"1g.18gb": [0]}),
        (("auto",), ["3g.71gb", "7g.141gb"], {"3g.71gb": [0, 4], "7g.141gb": [0]}),
    ],
    ids=["layout", "layout and profiles", "profiles"],
)
def test_claims_may_have_the_placements_of_the_layout_or_else_all_of_the_allowed_profiles(
    layout: tuple[str, ...], profiles: list[str] | None, found: dict[str, list[int]]
) -> None:
    rule = {} if profiles is None else {"mig": {"profiles": profiles}}
    card = Card()
    node = Node1(card, Disk(), rule)
    run(node.inventory.refresh())
    node.apply(*layout)
    policy = Policy.model_validate({"device": [{"mode": "mig", **rule}]})
    keeper = SimpleNamespace(mig=node.layouts, policies=SimpleNamespace(policy=policy))
    room = Room(cast(Any, keeper), node.inventory, node.book)
    places = room.places(card.snapshot().devices[0])
    assert {name: sorted(place.start for place in at) for _, name, at in places} == found
