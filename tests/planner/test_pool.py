"""The maker of an idle MIG instance (vgpud, the policy or an administrator) decides which requests may use
it.
"""

from dataclasses import replace

from vgpud.model.device import DeviceProcess, GpuInstance, Placement
from vgpud.model.tenancy import Decision
from vgpud.planner.choose import choose
from vgpud.planner.pool import Pool
from vgpud.planner.steps import allocate_steps

from .cards import h200, instance, node_of, policy, request, used_mig

MIG = policy({"mode": "mig"})


def decide(
    profile: str,
    instances: tuple[GpuInstance, ...],
    pool: Pool,
    held: tuple[tuple[int, int], ...] = (),
    busy: tuple[int, ...] = (),
) -> Decision:
    device = h200(0, mig_on=True, instances=instances)
    device = replace(device, processes=tuple(DeviceProcess(100 + i, None, "compute", i) for i in busy))
    use = {"GPU-0": used_mig(*held)} if held else {}
    return choose(request(mig_profile=profile), node_of(device), MIG, use, pools={"GPU-0": pool})


def start(decision: Decision) -> int | None:
    if not decision.slices:
        return None
    mig = decision.slices[0].mig
    assert mig is not None
    return mig.placement.start


def own(*instances: GpuInstance) -> frozenset[tuple[int, Placement]]:
    return frozenset((i.profile_id, i.placement) for i in instances)


IDLE = instance(1, 19, 2)


def test_an_idle_mig_instance_of_vgpud_is_used_before_another_is_made() -> None:
    assert start(decide("1g.18gb", (IDLE,), Pool(own(IDLE)))) == 2
    assert start(decide("1g.18gb", (IDLE,), Pool(own(IDLE)), busy=(1,))) != 2
    assert start(decide("1g.18gb", (IDLE,), Pool(own(IDLE)), held=((19, 2),))) != 2


def test_a_mig_instance_made_outside_vgpud_is_allocated_only_if_the_policy_lends_it() -> None:
    assert start(decide("1g.18gb", (IDLE,), Pool())) != 2
    assert start(decide("1g.18gb", (IDLE,), Pool(foreign="lend"))) == 2
    assert start(decide("1g.18gb", (IDLE,), Pool(foreign="lend"), busy=(1,))) != 2


def test_an_idle_mig_instance_in_the_way_is_made_again_at_another_place() -> None:
    decision = decide("4g.71gb", (IDLE,), Pool(own(IDLE)))
    assert start(decision) == 0
    (move,) = decision.moves
    assert (move.profile_name, move.source.start) == ("1g.18gb", 2)
    assert move.target is not None
    assert move.target.start >= 4
    kinds = [step.kind.value for step in allocate_steps(decision.slices, {}, decision.moves)]
    assert kinds.index("clear-instance") < kinds.index("attach")


def test_mig_instances_in_use_and_foreign_ones_are_never_moved() -> None:
    for pool, held, busy in (
        (Pool(), (), ()),
        (Pool(own(IDLE)), ((19, 2),), ()),
        (Pool(own(IDLE)), (), (1,)),
        (Pool(foreign="lend"), (), ()),
    ):
        decision = decide("4g.71gb", (IDLE,), pool, held, busy)
        assert decision.refusal is not None
        assert not decision.moves
    assert decide("4g.71gb", (IDLE,), Pool(foreign="remove")).moves


def test_with_a_fixed_layout_only_its_mig_instances_are_allocated() -> None:
    fixed = Pool(layout=frozenset({(9, Placement(4, 4))}), dynamic=False)
    assert start(decide("3g.71gb", (), fixed)) == 4
    refused = decide("1g.18gb", (), fixed)
    assert refused.refusal is not None
    assert "its layout is fixed, free are 3g.71gb" in refused.reasons[0].sentence
    full = decide("3g.71gb", (instance(1, 9, 4),), fixed, held=((9, 4),))
    assert full.refusal is not None


def test_as_few_idle_mig_instances_as_possible_are_moved() -> None:
    """A 2g is requested, and idle 1g instances are at 0, 2, 4 and 5. One move, of the 1g at 0 or at 2, is
    enough.
    """
    idle = tuple(instance(n, 19, place) for n, place in enumerate((0, 2, 4, 5), 1))
    busy = (instance(9, 19, 6),)
    decision = decide("2g.35gb", (*idle, *busy), Pool(own(*idle)), busy=(9,))
    assert len(decision.moves) == 1
    assert decision.moves[0].target is not None
