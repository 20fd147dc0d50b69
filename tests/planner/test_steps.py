"""The order of the steps of a plan, and the devices whose mode a plan changes."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from vgpud.model.plan import Step, StepKind
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Allocation, Mode, Slice, State
from vgpud.planner.steps import allocate_steps, release_steps, repair_steps
from vgpud.planner.use import use_of

from .cards import request

PAIR = (Slice("GPU-0", Mode.MPS, GIB), Slice("GPU-1", Mode.MPS, GIB))


def allocation(*slices: Slice, name: str = "a") -> Allocation:
    return Allocation(name, request(), State.ACTIVE, slices)


def short(steps: Iterable[Step]) -> list[tuple[str, str]]:
    return [(step.fault_point, step.device_uuid) for step in steps]


def test_the_steps_of_an_allocation_on_idle_devices_are_in_order() -> None:
    assert short(allocate_steps(PAIR, {})) == [
        ("record-intent", ""),
        ("apply-mode", "GPU-0"),
        ("apply-mode", "GPU-1"),
        ("attach-0", "GPU-0"),
        ("attach-1", "GPU-1"),
        ("write-spec", ""),
        ("commit", ""),
    ]


def test_an_engine_is_chosen_before_the_first_preload_tenant_of_a_whole_device() -> None:
    whole, part = Slice("GPU-0", Mode.PRELOAD, GIB), allocation(Slice("GPU-0", Mode.PRELOAD, GIB))
    chosen = ("choose-engine", "GPU-0")
    points = short(allocate_steps((whole,), {}))
    assert points.index(("apply-mode", "GPU-0")) < points.index(chosen) < points.index(("attach-0", "GPU-0"))
    assert chosen not in short(allocate_steps((whole,), use_of([part])))
    assert chosen in short(repair_steps(part)), "the run folder may be empty, after a boot"
    assert not any(step.kind is StepKind.CHOOSE_ENGINE for step in allocate_steps(PAIR, {}))


def test_an_allocation_applies_the_mode_only_to_devices_without_slices() -> None:
    use = use_of([allocation(PAIR[0])])
    assert ("apply-mode", "GPU-0") not in short(allocate_steps(PAIR, use))
    assert ("apply-mode", "GPU-1") in short(allocate_steps(PAIR, use))


def test_the_steps_of_a_release_are_those_of_the_allocation_in_reverse() -> None:
    mine = allocation(*PAIR)
    assert short(release_steps(mine, use_of([mine]))) == [
        ("record-intent", ""),
        ("remove-spec", ""),
        ("detach-1", "GPU-1"),
        ("detach-0", "GPU-0"),
        ("unapply-mode", "GPU-0"),
        ("unapply-mode", "GPU-1"),
        ("forget", ""),
    ]


def test_a_device_with_other_slices_stays_in_its_mode() -> None:
    mine, other = allocation(*PAIR), allocation(PAIR[1], name="b")
    points = short(release_steps(mine, use_of([mine, other])))
    assert ("unapply-mode", "GPU-0") in points
    assert ("unapply-mode", "GPU-1") not in points


def test_a_repair_repeats_every_step_of_the_allocation() -> None:
    assert short(repair_steps(allocation(*PAIR))) == [
        ("apply-mode", "GPU-0"),
        ("apply-mode", "GPU-1"),
        ("attach-0", "GPU-0"),
        ("attach-1", "GPU-1"),
        ("write-spec", ""),
        ("commit", ""),
    ]


@given(st.lists(st.tuples(st.sampled_from(["GPU-0", "GPU-1"]), st.booleans()), min_size=1, max_size=6))
def test_a_plan_begins_with_the_intent_and_ends_with_the_outcome(made: list[tuple[str, bool]]) -> None:
    mode = Mode.PRELOAD
    mine = allocation(*(Slice(uuid, mode, GIB) for uuid, _ in made))
    others = [allocation(Slice(uuid, mode, GIB), name=str(i)) for i, (uuid, more) in enumerate(made) if more]
    up = allocate_steps(mine.slices, use_of(others))
    down = release_steps(mine, use_of([mine, *others]))
    assert up.intent.kind is down.intent.kind is StepKind.RECORD_INTENT
    assert (up.outcome.kind, down.outcome.kind) == (StepKind.COMMIT, StepKind.FORGET)
    assert all(step.reason for step in (*up, *down))
    points = [step.fault_point + step.device_uuid for step in (*up, *down)]
    assert len(points) == len(set(points)) + 1  # only record-intent is in both plans
    applied = {step.device_uuid for step in up if step.kind is StepKind.APPLY_MODE}
    undone = {step.device_uuid for step in down if step.kind is StepKind.UNAPPLY_MODE}
    assert (
        applied
        == undone
        == {uuid for uuid, _ in made} - {piece.device_uuid for o in others for piece in o.slices}
    )
