"""Pausing under engine `cut`: a tenant is preempted on its devices until its lease lifts the pause."""

from pathlib import Path

from tests.arbiter.accounts import device_works, divide, done_ns
from tests.arbiter.conftest import GIB, LONG, Card, counters
from tests.arbiter.test_cut import CONSERVING, HARD, table
from tests.arbiter.test_cut_lives import is_off
from tests.e2e.support import eventually
from vgpud.lease import DeviceLimits, SharePolicy, read_activity, read_limits, update_limits

FREE = SharePolicy.NONE


def order(card: Card, lease: Path, paused: bool, away: bool | None = None) -> None:
    update_limits(lease, read_limits(lease).devices, paused=paused, away=away)
    card.client.add(lease.name)
    if away is not None:
        card.client.look(lease.name)


def pause(card: Card, lease: Path) -> None:
    order(card, lease, True)
    eventually(lambda: card.client.registered(lease.name).paused, "it is off its device")
    assert is_off(lease)


def stands_still(card: Card, pid: int, beside: Path) -> None:
    """Asserts that the process does no work while the device works for another tenant."""
    before = done_ns(card, pid)
    other = card.spin(beside, LONG)
    device_works(card, other.pid, milliseconds=300)
    assert done_ns(card, pid) == before
    other.kill()
    other.wait()


def test_a_paused_tenant_stands_still_and_leaves_the_device_to_others(cut_card: Card) -> None:
    for policy, share in ((FREE, 100), (CONSERVING, 50), (HARD, 50)):
        name = policy.name.lower()
        lease, other = cut_card.lease(name, policy, share), cut_card.lease(f"{name}-other", FREE, 100)
        process = cut_card.spin(lease, LONG)
        device_works(cut_card, process.pid)
        for _ in range(2):
            pause(cut_card, lease)
            stands_still(cut_card, process.pid, other)
            order(cut_card, lease, False)
            device_works(cut_card, process.pid)
            assert not cut_card.client.registered(lease.name).paused
        process.kill()
        process.wait()


def test_a_paused_tenant_accumulates_no_waiting_time_and_has_its_share_afterwards(cut_card: Card) -> None:
    lease, other = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    pause(cut_card, lease)
    waited = counters(lease)["waited_ns"]
    device_works(cut_card, cut_card.spin(other, LONG).pid, milliseconds=300)
    assert counters(lease)["waited_ns"] == waited
    order(cut_card, lease, False)
    divide(lease, other, least=25, most=75)
    device_works(cut_card, process.pid)


def test_a_program_that_a_paused_tenant_starts_is_kept_off_the_device_too(cut_card: Card) -> None:
    lease, other = cut_card.lease("a", FREE, 100), cut_card.lease("b", FREE, 100)
    pause_of_none = cut_card.client.registered("a").paused
    order(cut_card, lease, True)
    eventually(lambda: cut_card.client.registered("a").paused, "a tenant without processes is paused")
    process = cut_card.spin(lease, LONG)
    eventually(lambda: is_off(lease), "its channels are disabled")
    stands_still(cut_card, process.pid, other)
    order(cut_card, lease, False)
    device_works(cut_card, process.pid)
    assert not pause_of_none


def test_a_tenant_is_still_paused_after_the_arbiter_is_restarted(cut_card: Card) -> None:
    lease, other = cut_card.lease("a", FREE, 100), cut_card.lease("b", FREE, 100)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    pause(cut_card, lease)
    cut_card.kill_arbiter()
    cut_card.start_arbiter()
    eventually(lambda: cut_card.client.registered("a").pids == (process.pid,), "it is registered again")
    eventually(lambda: cut_card.client.registered("a").paused, "it is off again")
    stands_still(cut_card, process.pid, other)
    order(cut_card, lease, False)
    device_works(cut_card, process.pid)


def test_a_tenant_killed_while_paused_leaves_nothing_on_the_device(cut_card: Card) -> None:
    lease = cut_card.lease("a", FREE, 100)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    pause(cut_card, lease)
    process.kill()
    process.wait()
    device_works(cut_card, cut_card.spin(cut_card.lease("b", FREE, 100), LONG).pid)


def test_a_suspension_lifts_the_pause_until_the_tenant_is_resumed(cut_card: Card) -> None:
    """During the suspension the tenant needs its channels: its work in flight must end, and libvgpu copies
    its memory.
    """
    lease, other = cut_card.lease("a", HARD, 50), cut_card.lease("b", FREE, 100)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    pause(cut_card, lease)
    order(cut_card, lease, True, away=True)
    eventually(lambda: read_activity(lease).quiet, "nothing of it is in the driver")
    eventually(lambda: not is_off(lease), "it is on the device")
    order(cut_card, lease, True, away=False)
    eventually(lambda: cut_card.client.registered("a").paused, "it is off again")
    stands_still(cut_card, process.pid, other)
    order(cut_card, lease, False)
    device_works(cut_card, process.pid)


def test_a_paused_tenant_goes_on_after_its_lease_is_removed_from_the_arbiter(cut_card: Card) -> None:
    lease = cut_card.lease("a", FREE, 100)
    process = cut_card.spin(lease, LONG)
    device_works(cut_card, process.pid)
    pause(cut_card, lease)
    cut_card.client.remove("a")
    device_works(cut_card, process.pid)


def test_a_tenant_under_the_gate_engine_does_not_count_as_paused(card: Card) -> None:
    lease = card.lease("a", FREE, 100)
    process = card.spin(lease, LONG)
    eventually(lambda: card.client.registered("a").pids == (process.pid,), "it is registered")
    order(card, lease, True)
    assert not card.client.registered("a").paused
    assert read_limits(lease).devices == (DeviceLimits(card.uuids[0], 8 * GIB),)
    assert table(lease)[0] == 0
