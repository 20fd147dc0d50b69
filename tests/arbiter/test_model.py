"""The scheduler against its models in tests/native/unit: sched_model.c, sched_exact.c, sched_backfill.c."""

import subprocess
from dataclasses import dataclass

import pytest

from tests.native.harness import TEST_BUILD


def model(*words: str, program: str = "sched-model") -> None:
    done = subprocess.run(
        [str(TEST_BUILD / program), *words], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Use:
    """What a tenant with half of a device uses under the engine `cut`, in percent of 20 s."""

    device: float
    off: float  # percent of the tenant's time with work in which the tenant is preempted
    shared: float  # percent of the tenant's time on the device that another tenant shares


def backfill(*tenants: str) -> list[Use]:
    """Runs the model of backfilling with these tenants. Each is `KIND WORK_US PERIOD_US`."""
    words = [word for tenant in tenants for word in tenant.split()]
    said = subprocess.check_output([str(TEST_BUILD / "sched-backfill"), *words], text=True, timeout=600)
    return [Use(*map(float, line.split())) for line in said.splitlines()]


ENDLESS = "0 0"


@pytest.mark.parametrize("kind", ["lent", "hard"])
def test_two_tenants_that_leave_gaps_are_not_preempted(kind: str) -> None:
    for use in backfill(f"{kind} 8000 20000", f"{kind} 8000 20000"):
        assert use.device == pytest.approx(40, abs=0.1)
        assert use.off < 0.1 and use.shared > 10


@pytest.mark.parametrize("kind", ["lent", "hard"])
def test_a_tenant_with_gaps_backfills_the_slices_of_a_tenant_without_gaps(kind: str) -> None:
    gaps, full = backfill(f"{kind} 5000 20000", f"{kind} {ENDLESS}")
    assert gaps.device == pytest.approx(25, abs=0.1)
    assert gaps.off < 5
    assert full.device == pytest.approx(75 if kind == "lent" else 50, abs=1)


@pytest.mark.parametrize("work", [ENDLESS, "18000 20000"])
@pytest.mark.parametrize("kind", ["lent", "hard"])
def test_two_tenants_that_fill_the_device_have_exclusive_slices(kind: str, work: str) -> None:
    for use in backfill(f"{kind} {work}", f"{kind} {work}"):
        assert use.device == pytest.approx(50, abs=0.2)
        assert use.shared < 0.1


@pytest.mark.parametrize("work_us", range(4000, 10000, 500))
def test_gaps_before_an_idle_time_do_not_count_after_it(work_us: int) -> None:
    """A verdict holds for 4 s, and the idle time is 4.5 s. Depending on the work, the verdict on the gaps is
    reached when the tenant returns.
    """
    for use in backfill(f"returns {work_us} 20000", f"returns {work_us} 20000"):
        assert use.device == pytest.approx(50, abs=0.2)
        assert use.shared < 0.1


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_device_has_one_holder_whenever_a_tenant_waits(seed: int) -> None:
    model(str(seed), "40000")


def test_tenants_of_one_and_of_several_devices_get_their_weights() -> None:
    """Tenants of two devices beside tenants of one, in chains and in rings, with hard shares, with lent time
    and without a limit.
    """
    model("shares")


def test_kernels_that_wait_for_each_other_on_two_devices_make_progress() -> None:
    """The tenant has a process on each device. It runs alone, beside another such tenant, and beside a tenant
    of one device.
    """
    model("ranks")


def test_each_tenant_gets_its_weight_for_any_length_of_turns_and_kernels() -> None:
    """Each tenant's use is within 0.6 % of its weight over 40 s. In windows of 4 s the error is at most the
    slice or kernel at the window's edges.
    """
    model("weights", program="sched-exact")


@pytest.mark.parametrize("seed", range(1, 4))
def test_no_tenant_starves_at_any_priority(seed: int) -> None:
    """A tenant waits at most one second plus the slices of the tenants before it in the run queue."""
    model("starving", str(seed), program="sched-exact")
