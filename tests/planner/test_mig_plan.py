"""Plans for the MIG instances of one device: the existing instances, the requested ones, and the steps from
the first to the second.
"""

from dataclasses import replace

import pytest

from tests.planner.cards import H200_PROFILES, h200, instance, used, used_mig
from vgpud.model.device import GpuInstance, Mig, Placement
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import Mode
from vgpud.planner.mig_plan import DevicePlan, plan_defrag, plan_device
from vgpud.planner.pool import NO_POOL, Pool
from vgpud.planner.use import EMPTY, DeviceUse


def key(profile_id: int, start: int) -> tuple[int, Placement]:
    kind = next(p for p in H200_PROFILES if p.id == profile_id)
    return profile_id, next(p for p in kind.placements if p.start == start)


def pool_of(*places: tuple[int, int]) -> Pool:
    return Pool(own=frozenset(key(*place) for place in places))


def plan(
    words: str, *instances: GpuInstance, pool: Pool = NO_POOL, use: DeviceUse = EMPTY, on: bool = True
) -> DevicePlan:
    return plan_device(h200(0, mig_on=on, instances=instances), use, pool, words.split())


def steps(made: DevicePlan) -> list[str]:
    return [step.words for step in made.steps]


def test_a_layout_for_a_device_without_mig_is_refused() -> None:
    for mig in (Mig(), Mig(capable=True)):
        with pytest.raises(VgpuError) as caught:
            plan_device(h200(0, mig=mig), EMPTY, NO_POOL, ["1g.18gb"])
        assert caught.value.code is ErrorCode.UNSUPPORTED


def test_a_plan_for_a_layout_first_switches_mig_mode_on() -> None:
    made = plan("3g.71gb", on=False)
    assert made.possible
    assert steps(made) == ["enable MIG mode", "create 3g.71gb at memory slice 4"]
    assert [step.fault_point for step in made.steps] == ["enable", "create-9@4"]


def test_a_device_in_another_mode_gets_no_mig_layout() -> None:
    made = plan("3g.71gb", on=False, use=used(Mode.PRELOAD, GIB))
    assert (made.possible, made.steps) == (False, ())
    assert made.obstacle == "device 0 is in mode preload with 1 allocation"


def test_a_device_with_a_pending_reset_gets_no_mig_layout() -> None:
    waiting = h200(0, mig=Mig(capable=True, current=False, pending=True, profiles=H200_PROFILES))
    made = plan_device(waiting, EMPTY, NO_POOL, ["3g.71gb"])
    assert made.obstacle == "device 0 has a reset due, which brings MIG mode on"


def test_a_foreign_mig_instance_blocks_a_layout_in_its_place() -> None:
    made = plan("7g.141gb", instance(1, 19, 0))
    assert made.blockers == (key(19, 0),)


def test_layout_off_destroys_idle_instances_and_switches_mig_mode_off() -> None:
    made = plan("off", instance(1, 19, 0), pool=pool_of((19, 0)))
    assert (made.off, steps(made)) == (True, ["destroy 1g.18gb at memory slice 0", "disable MIG mode"])
    assert plan("off", on=False).steps == ()
    assert plan("off", on=False, use=used(Mode.MPS, GIB)).steps == ()


def test_mig_mode_is_not_disabled_while_used_or_unknown_instances_exist() -> None:
    held = plan("off", instance(1, 19, 0), pool=pool_of((19, 0)), use=used_mig((19, 0)))
    assert (held.blockers, held.steps) == ((key(19, 0),), ())
    unknown = GpuInstance(1, 77, Placement(0, 1), ())
    assert "does not list" in plan("off", unknown).obstacle


def test_layout_auto_destroys_idle_instances_of_vgpud_and_releases_the_mode() -> None:
    ours, theirs = instance(1, 19, 0), instance(2, 19, 1)
    made = plan("auto", ours, theirs, pool=pool_of((19, 0)))
    assert steps(made) == ["destroy 1g.18gb at memory slice 0", "release MIG mode"]
    assert plan("auto", ours, pool=pool_of((19, 0)), use=used_mig((19, 0))).steps == ()


#: two idle instances that leave no room for a 3g.71gb in either half of the device
SPREAD = (instance(1, 19, 0), instance(2, 19, 4))


def test_defrag_moves_an_idle_instance_to_fit_a_larger_one() -> None:
    made = plan_defrag(h200(0, mig_on=True, instances=SPREAD), EMPTY, pool_of((19, 0), (19, 4)))
    kinds = [step.do.value for step in made.steps]
    # instances are destroyed before others are created
    assert kinds == sorted(kinds, reverse=True) == ["destroy", "create"]
    assert all("it moves, which makes room for" in step.reason for step in made.steps)
    assert made.layout is None


def test_after_a_defrag_the_fixed_layout_has_the_moved_instance_in_its_new_place() -> None:
    fixed = replace(pool_of((19, 0), (19, 4)), layout=frozenset({key(19, 0), key(19, 4)}))
    made = plan_defrag(h200(0, mig_on=True, instances=SPREAD), EMPTY, fixed)
    (gone,) = [step.key for step in made.steps if step.do.value == "destroy"]
    (come,) = [step.key for step in made.steps if step.do.value == "create"]
    assert made.layout is not None and fixed.layout is not None
    assert made.layout == fixed.layout - {gone} | {come}


def test_defrag_moves_no_foreign_instance_and_none_without_gain() -> None:
    assert plan_defrag(h200(0, mig_on=True, instances=SPREAD), EMPTY, NO_POOL).steps == ()
    packed = h200(0, mig_on=True, instances=(instance(1, 9, 4),))
    assert plan_defrag(packed, EMPTY, pool_of((9, 4))).steps == ()
