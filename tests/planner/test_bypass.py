"""The rules by which a tenant counts as bypassing libvgpu and a process as part of a tenant, tested by tables
and by properties.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpud.model.tenancy import ANYONE, Owner
from vgpud.planner.bypass import (
    CLEAR_SECONDS,
    Belongings,
    ProcessFacts,
    Reading,
    Verdict,
    Watched,
    excess_bytes,
    first_sight,
    judge,
    tenant_of,
    tolerance_bytes,
    under_limit,
)

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = 526 * MIB


def watched(limit: int = 2 * GIB) -> Watched:
    return Watched(limit, limit)


@pytest.mark.parametrize(
    ("held", "counted", "excess"),
    [
        (0, 0, 0),
        (CONTEXT, 0, CONTEXT),  # the process bypasses libvgpu, which counts nothing
        (CONTEXT + 64 * MIB, CONTEXT, 0),  # 64 MiB that libvgpu does not count yet are within the tolerance
        (72 * MIB, 0, 0),
        (73 * MIB, 0, 73 * MIB),
        (2 * GIB, 2 * GIB, 0),
        (
            64 * GIB,
            64 * GIB,
            62 * GIB,
        ),  # libvgpu counts all memory, 62 GiB of it above the limit (RTLD_DEEPBIND)
        (CONTEXT, 1 << 60, 0),  # the ledger claims more memory than exists
        (8 * GIB, 1 << 60, 6 * GIB),  # a false figure in the lease hides no more than the limit
        (0, GIB, 0),  # libvgpu counts managed memory, and NVML does not report it
    ],
)
def test_memory_beyond_what_libvgpu_counted_or_beyond_the_limit_is_an_excess(
    held: int, counted: int, excess: int
) -> None:
    assert excess_bytes(watched(), Reading(held, counted, 1)) == excess


def test_the_tolerance_for_uncounted_memory_stays_below_the_size_of_one_context() -> None:
    assert tolerance_bytes(1) == 72 * MIB
    assert tolerance_bytes(1000) == 256 * MIB < 412 * MIB


def test_one_reading_with_an_excess_marks_a_tenant_and_a_minute_without_excess_removes_the_mark() -> None:
    now, verdict = judge(watched(), 0, 0.0)
    assert verdict is Verdict.NOTHING
    now, verdict = judge(now, CONTEXT, 1.0)
    assert verdict is Verdict.MARK
    now, verdict = judge(now, CONTEXT, 2.0)
    assert verdict is Verdict.STAYS
    now, _ = judge(now, 0, 3.0)
    now, verdict = judge(now, 0, 3.0 + CLEAR_SECONDS - 0.1)
    assert verdict is Verdict.NOTHING
    again, verdict = judge(now, CONTEXT, 3.0 + CLEAR_SECONDS - 0.05)
    assert verdict is Verdict.STAYS
    assert judge(again, 0, 3.0 + CLEAR_SECONDS)[1] is Verdict.NOTHING, "the minute begins anew"
    now, verdict = judge(now, 0, 3.0 + CLEAR_SECONDS)
    assert (verdict, now.marked) == (Verdict.CLEAR, False)


def test_memory_held_from_before_a_limit_was_lowered_is_not_an_excess() -> None:
    lowered = under_limit(watched(4 * GIB), GIB, 3 * GIB)
    assert excess_bytes(lowered, Reading(3 * GIB, 3 * GIB, 1)) == 0
    less = under_limit(lowered, GIB, 2 * GIB)
    assert excess_bytes(less, Reading(3 * GIB, 3 * GIB, 1)) == GIB, "what it gave back it cannot take again"
    assert under_limit(less, 4 * GIB, 2 * GIB).ceiling_bytes == 4 * GIB


def test_after_a_restart_counted_use_above_the_limit_is_not_taken_for_a_bypass() -> None:
    reading = Reading(3 * GIB, 3 * GIB, 1)
    assert excess_bytes(first_sight(GIB, reading, is_new=False, marked=False), reading) == 0
    assert excess_bytes(first_sight(GIB, reading, is_new=True, marked=False), reading) == 2 * GIB
    assert excess_bytes(first_sight(GIB, reading, is_new=False, marked=True), reading) == 2 * GIB
    uncounted = Reading(3 * GIB, 0, 1)
    assert excess_bytes(first_sight(GIB, uncounted, is_new=False, marked=False), uncounted) == 3 * GIB


class Honest:
    """A tenant that charges memory before the driver allocates it, and removes the charge after the driver
    has freed it. The driver has overhead that libvgpu does not know yet. The tenant can act between any two
    readings.
    """

    def __init__(self, seed: int, limit: int, processes: int) -> None:
        self.random = random.Random(seed)
        self.limit, self.processes = limit, processes
        self.held = self.counted = self.unlearnt = 0

    def step(self) -> None:
        choice = self.random.random()
        room = self.limit - self.counted
        if choice < 0.4 and room > 0:
            self.counted += (claim := self.random.randint(1, room))
            if self.random.random() < 0.8:
                self.held = min(self.held + claim, self.counted + self.unlearnt)
        elif choice < 0.8:
            self.held -= (freed := self.random.randint(0, self.held))
            self.counted = max(self.held, self.counted - freed)
        else:  # the driver's own memory for a module or for local memory, at most as much as a launch needs
            self.unlearnt = self.random.randint(0, tolerance_bytes(self.processes))
            self.held = min(self.held, self.counted) + self.unlearnt

    def read(self) -> Reading:
        before = self.counted
        if self.random.random() < 0.5:
            self.step()
        held = self.held
        if self.random.random() < 0.5:
            self.step()
        return Reading(held, max(before, self.counted), self.processes)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(64 * MIB, 140 * GIB), st.integers(1, 40))
def test_an_honest_tenant_is_never_marked(seed: int, limit: int, processes: int) -> None:
    tenant, state = Honest(seed, limit, processes), watched(limit)
    for look in range(6):
        excess = min(excess_bytes(state, tenant.read()) for _ in range(8))
        state, verdict = judge(state, excess, look)
        assert verdict is Verdict.NOTHING


@given(st.integers(0, 140 * GIB), st.integers(0, 100), st.integers(CONTEXT, 140 * GIB))
def test_a_process_that_bypasses_libvgpu_is_marked_at_the_first_reading(
    counted: int, processes: int, more: int
) -> None:
    limit = max(counted, GIB)
    excess = excess_bytes(watched(limit), Reading(counted + more, counted, processes + 1))
    assert judge(watched(limit), excess, 0.0)[1] is Verdict.MARK


def owners(**uids: int) -> dict[str, Owner]:
    return {name: Owner(uid, uid) for name, uid in uids.items()}


def known(**given_: object) -> Belongings:
    empty: dict[str, object] = {"registered": {}, "in_cgroup": {}, "lifetimes": {}}
    return Belongings(**{"owners": owners(a=1, b=2, pod=ANYONE), **empty, **given_})  # type: ignore[arg-type]


SHELL = ProcessFacts(10, 5, 1)


@pytest.mark.parametrize(
    ("line", "belongings", "tenant"),
    [
        ([ProcessFacts(20, 9, 1)], known(), ""),
        ([ProcessFacts(20, 9, 1)], known(registered={20: "a"}), "a"),
        ([ProcessFacts(20, 9, 7)], known(in_cgroup={20: "pod"}), "pod"),
        ([ProcessFacts(20, 9, 7, mounted="pod")], known(), "pod"),
        ([ProcessFacts(20, 9, 1, named="a")], known(), "a"),
        # the process names an allocation of another user
        ([ProcessFacts(20, 9, 2, named="a")], known(), ""),
        ([ProcessFacts(20, 9, 0, named="a")], known(), ""),
        # a process that names the allocation of a pod does not belong to the pod by that alone
        ([ProcessFacts(20, 9, 7, named="pod")], known(), ""),
        ([ProcessFacts(20, 9, 1, named="gone")], known(), ""),
        ([ProcessFacts(20, 9, 1), SHELL], known(registered={10: "a"}), "a"),
        # the process runs as another user than the owner of the allocation, so its tenant is uncertain
        ([ProcessFacts(20, 9, 2), SHELL], known(registered={10: "a"}), ""),
        ([ProcessFacts(20, 9, 0), SHELL], known(registered={10: "a"}), ""),
        ([ProcessFacts(20, 9, 7), SHELL], known(registered={10: "pod"}), "pod"),
        ([ProcessFacts(20, 9, 1), SHELL], known(lifetimes={(10, 5): "a"}), "a"),
        # the recorded process is an earlier one with the same pid
        ([ProcessFacts(20, 9, 1), SHELL], known(lifetimes={(10, 6): "a"}), ""),
        ([ProcessFacts(20, 9, 2), SHELL], known(lifetimes={(10, 5): "a"}), ""),
        # the allocation of the nearest ancestor counts
        (
            [ProcessFacts(20, 9, 1), ProcessFacts(15, 7, 1, named="c"), SHELL],
            known(registered={10: "a"}),
            "a",
        ),
        ([ProcessFacts(20, 9, 1, named="a"), SHELL], known(registered={10: "b"}), "a"),
    ],
)
def test_a_process_belongs_to_an_allocation_only_where_that_is_certain(
    line: list[ProcessFacts], belongings: Belongings, tenant: str
) -> None:
    assert tenant_of(line, belongings) == tenant
