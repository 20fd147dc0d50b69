"""Tenants of a simulated card under the real arbiter: time slices, policies, dead processes and malformed
messages (see accounts.py).
"""

import asyncio
import os
import random
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.arbiter.accounts import (
    Accounts,
    divide,
    goes_on,
    have_turns,
    is_held_to,
    launches,
    throttled_ns,
    works,
)
from tests.arbiter.conftest import LONG, Card, answer, counters
from tests.e2e.support import eventually
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy, note_moved, write_lease

HARD, CONSERVING, NONE = SharePolicy.HARD, SharePolicy.WORK_CONSERVING, SharePolicy.NONE
WANT, DONE = 4, 5


@pytest.mark.parametrize("mode", ["plain", "green", "callbacks"])
def test_a_lone_hard_tenant_is_held_to_its_share(card: Card, mode: str) -> None:
    """The share also bounds green contexts, and kernels with host functions behind them."""
    lease = card.lease("a", HARD, 25)
    card.spin(lease, LONG, "--mode", mode)
    is_held_to(lease, 25)


def test_two_hard_tenants_divide_the_card(card: Card) -> None:
    small, large = card.lease("a", HARD, 25), card.lease("b", HARD, 75)
    for lease in (small, large):
        card.spin(lease, LONG)
    divide(small, large, least=15, most=36)


def test_the_processes_of_a_tenant_have_one_share_together(card: Card) -> None:
    several, one = card.lease("a", HARD, 30), card.lease("b", HARD, 60)
    for _ in range(3):
        card.spin(several, LONG, "--mode", "streams")
    card.spin(one, LONG)
    divide(several, one, least=20, most=45)


def test_a_kernel_longer_than_its_time_slice_is_charged(card: Card) -> None:
    """A time slice with a long kernel ends late, and the tenant's next slice starts later by the same
    time.
    """
    lease = card.lease("a", HARD, 10)
    card.kernel_us = 40_000
    card.spin(lease, LONG)
    is_held_to(lease, 10, turns=4)


def test_device_time_of_an_idle_tenant_is_lent_and_returned(card: Card) -> None:
    lent, owner = card.lease("a", CONSERVING, 20), card.lease("b", CONSERVING, 80)
    idle = card.spin(owner, LONG, "--every-us", "400000")
    card.spin(lent, LONG)
    Accounts(lent, owner).come_to(lambda got: got.part > 60, "the idle tenant's time is lent", turns=3)
    idle.kill()
    card.spin(owner, LONG)
    divide(lent, owner, least=8, most=36)


def test_tenants_without_compute_limits_get_no_time_slices(card: Card) -> None:
    leases = [card.lease(name, NONE, 100) for name in "ab"]
    for process in [card.spin(lease, 0.5) for lease in leases]:
        assert works(process)
    counted = [counters(lease) for lease in leases]
    assert all(one["turns"] <= 3 for one in counted), counted


def test_a_change_of_share_takes_effect_in_a_running_tenant(card: Card) -> None:
    lease = card.lease("a", HARD, 90)
    card.spin(lease, LONG)
    is_held_to(lease, 90)
    card.change(lease, HARD, 10)
    is_held_to(lease, 10)


def test_a_time_slice_ends_when_its_holder_dies(card: Card) -> None:
    dying, living = card.lease("a", CONSERVING, 50), card.lease("b", CONSERVING, 50)
    victim = card.spin(dying, LONG)
    card.spin(living, LONG)
    have_turns(dying, living, turns=3)
    victim.kill()
    assert works(card.spin(living, 0.5))


def test_a_stopped_holder_of_a_time_slice_is_bypassed(card: Card) -> None:
    stopped, living = card.lease("a", CONSERVING, 50), card.lease("b", CONSERVING, 50)
    victim = card.spin(stopped, LONG)
    card.spin(living, LONG)
    have_turns(stopped, living, turns=3)
    before = counters(stopped)["bypasses"]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        assert works(card.spin(living, 0.5))
        # after a bypass the arbiter does not wait for the stopped process again until the process answers
        assert counters(stopped)["bypasses"] - before <= 2
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    have_turns(stopped, living, turns=3)


def test_a_share_holds_while_the_arbiter_is_down_and_after_its_restart(card: Card) -> None:
    lease = card.lease("a", HARD, 25)
    card.spin(lease, LONG)
    have_turns(lease)
    card.kill_arbiter()
    goes_on(lease)
    before = throttled_ns(lease)
    goes_on(lease)
    assert throttled_ns(lease) > before  # libvgpu itself delays launches while the arbiter is down
    card.start_arbiter()
    is_held_to(lease, 25)
    goes_on(lease)


def test_a_tenant_without_an_arbiter_keeps_its_share(card: Card) -> None:
    small, large = card.lease("a", HARD, 15), card.lease("b", HARD, 60)
    card.kill_arbiter()
    for lease in (small, large):
        card.spin(lease, LONG)
        goes_on(lease, 20)
    before = launches(small), launches(large)

    def divided() -> bool:
        got = launches(small) - before[0], launches(large) - before[1]
        return got[0] > 50 and got[1] > 1.5 * got[0]

    eventually(divided, "the larger share has more")
    assert min(throttled_ns(small), throttled_ns(large)) > 0
    card.start_arbiter()


def test_two_tenants_with_processes_on_the_same_two_devices_do_not_deadlock(card: Card) -> None:
    leases = [card.lease(name, CONSERVING, 50, devices=2) for name in "ab"]
    single = card.lease("c", CONSERVING, 50)
    for lease in leases:
        for device in ("0", "1"):
            card.spin(lease, LONG, "--device", device)
    card.spin(single, LONG)
    for ordinal in (0, 1):
        used = Accounts(*leases, ordinals=(ordinal, ordinal))
        used.come_to(lambda got: min(got.since("used_ns")) > 10_000_000, "each has the device", turns=0)
    one_of_three = Accounts(single, *leases)
    one_of_three.come_to(lambda got: got.since("turns")[0] >= 5 and got.part > 15, "a third of it", turns=0)


@pytest.mark.parametrize("policy", [NONE, CONSERVING])
def test_a_process_on_a_second_device_joins_the_time_slice_of_its_tenant(
    card: Card, policy: SharePolicy
) -> None:
    """The second process does not wait for a time slice, whether the share policy has time slices or not."""
    lease = card.lease("a", policy, 50, devices=2)
    card.spin(lease, LONG, "--device", "0")
    eventually(lambda: counters(lease)["turns"] > 0, "the first process has a turn")
    assert works(card.spin(lease, 0.5, "--device", "1"))


@pytest.mark.parametrize("mode", ["multi", "both"])
def test_a_process_on_several_devices_has_time_slices_on_each(card: Card, mode: str) -> None:
    """The process launches on all devices at once, and on one device after the other. Launches on the first
    device need no time slice.
    """
    both = card.lease("a", CONSERVING, 50, devices=2)
    single = card.lease("b", CONSERVING, 50, first_device=1)
    card.spin(both, LONG, "--mode", mode)
    card.spin(single, LONG)
    divide(both, single, ordinals=(1, 0), least=30, most=70)


def test_a_tenant_with_lower_priority_does_not_starve(card: Card) -> None:
    waits, normal = card.lease("a", CONSERVING, 50, priority=-1), card.lease("b", CONSERVING, 50)
    for lease in (waits, normal):
        card.spin(lease, LONG)
    have_turns(waits, normal, turns=1)
    Accounts(waits, normal).come_to(lambda got: 0 < got.part < 20, "little", turns=2)


def test_a_tenant_with_priority_gets_no_more_than_its_share(card: Card) -> None:
    first, normal = card.lease("a", CONSERVING, 30, priority=1), card.lease("b", CONSERVING, 70)
    for lease in (first, normal):
        card.spin(lease, LONG)
    divide(first, normal, least=20, most=40)


def message(kind: int, turn: int, flags: int, devices: int) -> bytes:
    head = struct.pack("<IIIIq", kind, layout.VERSION, 0, 0, 0)
    return (head + struct.pack("<QQQIIQ", turn, 2**64 - 1, 2**63, flags, devices, 2**64 - 1)).ljust(
        layout.MESSAGE_SIZE, b"\0"
    )


def test_random_messages_about_time_slices_do_not_change_another_tenants_share(card: Card) -> None:
    """The messages come from an unregistered process and from a registered one."""
    good = card.lease("b", HARD, 40)
    noisy = card.lease("a", HARD, 40)
    dice = random.Random(5)
    card.spin(good, LONG)
    for _ in range(400):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(str(noisy / layout.ARBITER_SOCKET))
            line.send(
                message(
                    dice.choice((WANT, DONE, 6, 7)),
                    dice.randrange(2**64),
                    dice.randrange(2**32),
                    dice.randrange(2**32),
                )
            )
    is_held_to(good, 40)
    assert card.client.ready()


def test_an_idle_arbiter_does_not_wake_up(card: Card) -> None:
    leases = [card.lease(name, HARD, 30) for name in "ab"]
    begin = str(time.monotonic_ns() + 900_000_000_000)
    for lease in leases:
        card.spin(lease, 1.0, "--begin-at", begin)
    assert card.arbiter is not None
    pid = card.arbiter.pid

    eventually(lambda: len(card.client.list("a") + card.client.list("b")) == 2, "its tenants have come")
    # the arbiter waits in epoll_pwait(2) without a timeout, because it has nothing to check later
    # (proc_pid_syscall(5))
    eventually(lambda: waits_for_ever(pid), "the arbiter sleeps until it is woken")


def test_the_arbiter_keeps_one_descriptor_open_for_an_idle_lease(card: Card) -> None:
    def open_descriptors() -> int:
        assert card.arbiter is not None
        return len(list(Path(f"/proc/{card.arbiter.pid}/fd").iterdir()))

    def one_each() -> bool:
        return before + 29 <= open_descriptors() <= before + 30

    before = open_descriptors()  # the count may include the connection of the test's readiness check
    leases = [card.lease(f"l{i}", HARD, 10) for i in range(30)]
    eventually(one_each, "one descriptor a lease")
    answer(card.spin(leases[7], 0.3))
    eventually(one_each, "one descriptor a lease")
    # the arbiter published the use before it closed the lease's files
    assert counters(leases[7])["used_ns"] > 0
    card.kill_arbiter()
    card.start_arbiter()
    eventually(one_each, "one descriptor a lease")


def waits_for_ever(pid: int) -> bool:
    """True if the process is in a system call whose fourth argument, the timeout of epoll_wait, is -1."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return len(words) > 4 and int(words[4], 16) & 0xFFFFFFFF == 0xFFFFFFFF


def test_a_moved_tenant_shares_its_new_device_with_the_tenant_there(card: Card) -> None:
    """The running process continues in time slices of the new device. Its earlier use stays counted."""
    moved, there = card.lease("a", HARD, 25), card.lease("b", HARD, 75, first_device=1)
    first = card.spin(moved, LONG)
    have_turns(moved)
    before = counters(moved)
    limits = card.limits(HARD, 25, first=1)
    asyncio.run(note_moved(moved, [device.uuid for device in limits]))
    write_lease(moved.parent, "a", limits, uid=os.getuid(), gid=os.getgid())
    card.client.add("a")
    eventually(lambda: card.client.list("a") == (first.pid,), "the arbiter knows the process")
    card.spin(there, LONG)
    divide(moved, there, least=15, most=36)
    assert counters(moved)["used_ns"] > before["used_ns"]
    assert (moved / layout.MOVED_FILE).read_text() == f"0 {card.uuids[0]}\n"
