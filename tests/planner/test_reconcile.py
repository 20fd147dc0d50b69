"""Convergence at a start of vgpud: after any cut of any plan, and any fault, ledger and node agree."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpud.model.device import Placement
from vgpud.model.quantity import GIB, Percent
from vgpud.model.tenancy import Allocation, Lifetime, MigSlice, Mode, Slice, State
from vgpud.planner.choose import choose
from vgpud.planner.reconcile import Action, ActionKind, InstancePlace, Observed, reconcile
from vgpud.planner.use import use_of

from .cards import AUTO, COMPUTE, h200, node_of, request
from .world import World

WANTS = (
    request(memory=4 * GIB),
    request(memory=4 * GIB, count=2),
    request(memory=2 * GIB, share=30, isolation=COMPUTE),
    request(mig_profile="1g.18gb"),
    request(mig_profile="3g.71gb", count=2),
    request(),
)


def decide(world: World, number: int, want: int, pid: int) -> Allocation | None:
    wanted = replace(WANTS[want], lifetime=Lifetime(pid, pid and 99))
    healthy = replace(world, lost=set(), absent=set())
    slices = choose(wanted, node_of(*healthy.devices()), AUTO, use_of(world.ledger.values())).slices
    return Allocation(f"a{number:02}", wanted, State.ALLOCATING, slices) if slices else None


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draws allocations and releases, each completed or cut anywhere as by kill -9."""
    world = World()
    if draw(st.booleans()):
        world.foreign.add(InstancePlace("GPU-0", 19, Placement(2, 1)))
    for number in range(draw(st.integers(0, 6))):
        allocation = decide(
            world, number, draw(st.integers(0, len(WANTS) - 1)), draw(st.sampled_from([0, 7]))
        )
        if allocation is not None:
            run(world.allocating(allocation), draw)
    for allocation in list(world.ledger.values()):
        if allocation.state is State.ACTIVE and draw(st.booleans()):
            run(world.releasing(allocation), draw)
    return world


def run(changes: list, draw: st.DrawFn) -> None:  # type: ignore[type-arg]
    end = len(changes) if draw(st.booleans()) else draw(st.integers(0, len(changes)))
    for change in changes[:end]:
        change()


@st.composite
def faults(draw: st.DrawFn, world: World) -> World:
    """Draws changes of the node that may have happened while vgpud was down."""
    kinds: tuple[set[Any], ...] = (world.leases, world.specs, world.daemons, world.instances)
    for things in kinds:
        for name in sorted(things):
            if draw(st.integers(0, 3)) == 0:
                things.discard(name)
    if draw(st.booleans()):
        world.specs.add("stray")
        world.leases.add("stray")
        world.records.add(InstancePlace("GPU-2", 20, Placement(1, 1)))
    if draw(st.booleans()):
        world.daemons.add("GPU-2")
    bound = sorted(a.id for a in world.ledger.values() if a.request.lifetime.pid)
    world.dead = set(draw(st.lists(st.sampled_from(bound)))) if bound else set()
    fate = draw(st.integers(0, 5))
    if fate == 0:
        world.reboot()
    if fate == 1:
        world.lost.add("GPU-1")
    if fate == 2:
        world.absent.add("GPU-1")
    return world


def converge(world: World) -> None:
    for action in world.reconcile():
        for change in world.changes(action):
            change()


def cut_converge(world: World, at: int) -> None:
    """Runs a start of vgpud that is cut after `at` single changes."""
    for action in world.reconcile():
        for change in world.changes(action):
            if at == 0:
                return
            change()
            at -= 1


@settings(max_examples=examples(125), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_start_converges_and_a_second_start_changes_nothing(data: st.DataObject) -> None:
    world = data.draw(faults(data.draw(worlds())))
    foreign = set(world.foreign)
    for at in data.draw(st.lists(st.integers(0, 25), max_size=3)):
        cut_converge(world, at)
    converge(world)
    world.check_agreement()
    assert world.reconcile() == ()
    assert world.foreign == foreign


@settings(max_examples=examples(75), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_allocations_of_living_tenants_are_kept(data: st.DataObject) -> None:
    world = data.draw(faults(data.draw(worlds())))
    held = {
        a.id: a.slices
        for a in world.ledger.values()
        if a.state is State.ACTIVE
        and a.id not in world.dead
        and not {piece.device_uuid for piece in a.slices} & (world.lost | world.absent)
    }
    rebooted = world.rebooted
    converge(world)
    if not rebooted:
        assert {name: world.ledger[name].slices for name in held} == held
        assert all(world.ledger[name].state is State.ACTIVE for name in held)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_without_nvml_a_start_changes_nothing(data: st.DataObject) -> None:
    world = data.draw(faults(data.draw(worlds())))
    world.absent = {"GPU-0", "GPU-1", "GPU-2"}
    assert world.reconcile() == ()


# --- single causes, with their sentences

QUOTA_SLICE = Slice("GPU-0", Mode.PRELOAD, GIB)
MPS_SLICE = Slice("GPU-0", Mode.MPS, GIB, Percent(3000))
MIG_SLICE = Slice("GPU-0", Mode.MIG, GIB, None, MigSlice(9, "3g.71gb", Placement(4, 4)))
MIG_PLACE = InstancePlace("GPU-0", 9, Placement(4, 4))


def held(*slices: Slice, state: State = State.ACTIVE, pid: int = 0) -> Allocation:
    return Allocation("a", request(lifetime=Lifetime(pid, 5 if pid else 0)), state, slices)


def there(**changes: object) -> World:
    """A node with all parts of a quota, an MPS or a MIG allocation "a" on GPU-0."""
    fields = {"leases": {"a"}, "specs": {"a"}, "daemons": set(), "instances": set(), **changes}
    return World(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allocation", "world", "kind", "reason"),
    [
        (held(QUOTA_SLICE, state=State.ALLOCATING), there(), ActionKind.UNDO, "it was never committed"),
        (held(QUOTA_SLICE, state=State.RELEASING), there(), ActionKind.FINISH, "its release was begun"),
        (
            held(QUOTA_SLICE, pid=7),
            there(dead={"a"}),
            ActionKind.RELEASE,
            "process 7 that it was bound to is gone",
        ),
        (
            held(QUOTA_SLICE, pid=7, state=State.FAILED),
            there(dead={"a"}),
            ActionKind.RELEASE,
            "process 7 that it was bound to is gone",
        ),
        (
            held(QUOTA_SLICE, pid=7),
            there(rebooted=True),
            ActionKind.RELEASE,
            "process 7 that it was bound to did not outlive the reboot",
        ),
        (
            held(QUOTA_SLICE),
            there(rebooted=True, leases=set(), specs=set()),
            ActionKind.RELEASE,
            "the reboot took its CDI file and lease",
        ),
        (
            replace(held(QUOTA_SLICE), request=replace(request(), id="kubelet/1")),
            there(rebooted=True, leases=set(), specs=set()),
            ActionKind.REPAIR,
            "missing: CDI file and lease",
        ),
        (
            held(QUOTA_SLICE),
            there(lost={"GPU-0"}),
            ActionKind.MARK_FAILED,
            "device 0 is lost",
        ),
        (
            held(QUOTA_SLICE),
            there(absent={"GPU-0"}),
            ActionKind.MARK_FAILED,
            "device GPU-0 is gone",
        ),
        (
            held(MIG_SLICE),
            there(leases=set(), foreign={InstancePlace("GPU-0", 19, Placement(5, 1))}),
            ActionKind.MARK_FAILED,
            "a MIG instance of others at memory slice 5 of device 0 lies where its own was",
        ),
        (
            held(QUOTA_SLICE),
            there(leases=set()),
            ActionKind.REPAIR,
            "missing: lease",
        ),
        (
            held(QUOTA_SLICE, state=State.RESIZING),
            there(specs=set()),
            ActionKind.REPAIR,
            "missing: CDI file",
        ),
        (
            held(MPS_SLICE),
            there(leases=set()),
            ActionKind.REPAIR,
            "missing: MPS daemon on device GPU-0",
        ),
        (
            held(MIG_SLICE),
            there(leases=set(), records={MIG_PLACE}),
            ActionKind.REPAIR,
            "missing: MIG instance on device GPU-0",
        ),
        (
            held(Slice("GPU-0", Mode.EXCLUSIVE, GIB)),
            there(),
            ActionKind.REMOVE_LEASE,
            "its allocation has no preload slice",
        ),
    ],
)
def test_each_difference_between_ledger_and_node_leads_to_one_action(
    allocation: Allocation, world: World, kind: ActionKind, reason: str
) -> None:
    world.ledger["a"] = allocation
    assert world.reconcile() == (Action(kind, "a", reason),)


@pytest.mark.parametrize(
    ("allocation", "world"),
    [
        (held(QUOTA_SLICE), there()),
        (held(QUOTA_SLICE), there(rebooted=True)),
        (held(QUOTA_SLICE, state=State.RESIZING), there()),
        (held(MPS_SLICE), there(leases=set(), daemons={"GPU-0"})),
        (held(MIG_SLICE), there(leases=set(), instances={MIG_PLACE}, records={MIG_PLACE})),
        (held(QUOTA_SLICE, state=State.FAILED), there(leases=set(), lost={"GPU-0"})),
        (
            held(MIG_SLICE),
            there(leases=set(), instances={MIG_PLACE}, foreign={InstancePlace("GPU-0", 19, Placement(0, 1))}),
        ),
    ],
)
def test_an_allocation_that_matches_the_node_needs_no_action(allocation: Allocation, world: World) -> None:
    world.ledger["a"] = allocation
    assert world.reconcile() == ()


def test_orphans_are_removed_and_foreign_mig_instances_stay() -> None:
    mine = InstancePlace("GPU-1", 19, Placement(6, 1))
    gone = InstancePlace("GPU-1", 19, Placement(5, 1))
    world = World(
        leases={"x"},
        specs={"y"},
        daemons={"GPU-2"},
        walls={"z"},
        instances={mine},
        records={mine, gone},
        foreign={InstancePlace("GPU-0", 9, Placement(0, 4))},
    )
    assert world.reconcile() == (
        Action(ActionKind.REMOVE_SPEC, "y", "no allocation has this id"),
        Action(ActionKind.REMOVE_LEASE, "x", "no allocation has this id"),
        Action(ActionKind.REMOVE_WALL, "z", "no allocation has this id"),
        Action(ActionKind.STOP_MPS, "GPU-2", "no allocation is in mode mps there"),
        Action(ActionKind.REMOVE_INSTANCE, "GPU-1", "it is on record and does not exist", gone),
        Action(ActionKind.REMOVE_INSTANCE, "GPU-1", "no allocation holds it", mine),
    )


def test_an_orphaned_mig_instance_on_a_lost_device_waits_for_the_device() -> None:
    world = World(records={InstancePlace("GPU-1", 19, Placement(6, 1))}, lost={"GPU-1"})
    assert world.reconcile() == ()


def test_orphans_are_removed_before_missing_parts_are_made() -> None:
    going = replace(held(QUOTA_SLICE, state=State.ALLOCATING), id="z")
    failing = replace(held(Slice("GPU-1", Mode.PRELOAD, GIB)), id="c")
    repaired = replace(held(QUOTA_SLICE), id="b")
    observed = Observed(node=node_of(h200(0)), specs=frozenset({"b", "c", "stray"}), leases=frozenset({"c"}))
    kinds = [action.kind for action in reconcile([repaired, failing, going], observed)]
    assert kinds == [ActionKind.UNDO, ActionKind.REMOVE_SPEC, ActionKind.MARK_FAILED, ActionKind.REPAIR]


def test_an_orphaned_mig_instance_is_removed_for_an_allocated_one() -> None:
    orphan = InstancePlace("GPU-0", 19, Placement(5, 1))
    world = there(leases=set(), instances={orphan}, records={orphan, MIG_PLACE})
    world.ledger["a"] = held(MIG_SLICE)
    assert [action.kind for action in world.reconcile()] == [ActionKind.REMOVE_INSTANCE, ActionKind.REPAIR]
