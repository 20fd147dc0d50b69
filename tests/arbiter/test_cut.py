"""Engine `cut`, which preempts tenants: compute shares, and the state of preempted tenants."""

import os
import random
import signal
import struct
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.arbiter.accounts import (
    Accounts,
    device_works,
    divide,
    have_turns,
    is_cut_to,
    is_held_to,
)
from tests.arbiter.conftest import GIB, LONG, Card, answer, counters
from tests.arbiter.test_pairs import pair
from tests.e2e.support import eventually
from tests.native.harness import TEST_BUILD
from tests.sim.tenant import Tenant
from vgpud import lease_layout as layout
from vgpud.lease import SharePolicy, update_limits

HARD, CONSERVING = SharePolicy.HARD, SharePolicy.WORK_CONSERVING
GROUP = struct.Struct("<16s4I8I")
DONE = 5


def table(lease: Path, slot: int = 0) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the devices on which the process of a slot is preempted, as a bit mask, and its channel
    groups.
    """
    raw = (lease / layout.USAGE_FILE).read_bytes()[layout.CHANNELS_AT + slot * layout.CHANNELS_SIZE :]
    _, count, _, off = struct.unpack_from("<QIII", raw)
    groups = [GROUP.unpack_from(raw, layout.CHANNELS_GROUPS + i * GROUP.size)[1:] for i in range(count)]
    return off, groups


def test_libvgpu_lists_the_channels_of_a_context_in_the_lease(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 50)
    cut_card.spin(lease, LONG)
    eventually(lambda: len(table(lease)[1]) == 1, "one group that computes")
    ((_, client, subdevice, count, *channels),) = table(lease)[1]
    assert client != 0 and subdevice != 0
    assert count == 8 and len(set(channels)) == 8


class RawTenant(Tenant):
    """A tenant that makes calls of the driver by `ioctl`, as libcuda does (native/common/rm.h)."""

    def __init__(self, card: Card, lease: Path) -> None:
        super().__init__(card.sim, card.tenant_variables(lease))
        eventually(lambda: len(table(lease)[1]) == 1, "its channels are listed")
        self.file, self.client, _, _, *self.channels = table(lease)[1][0]
        self.do("ioctl = c.CDLL(None).ioctl; enable = (c.c_uint8 * 3)(); at = c.addressof(enable)")

    def call(self, number: int, *words: int | str, status: int = -1) -> None:
        """Makes a call whose argument has these words of 32 bits. `status` is the index of the driver's
        answer in them.
        """
        self.do(f"a = (c.c_uint32 * {len(words)})({', '.join(map(str, words))}); a[{status}] = 99")
        request = 3 << 30 | 4 * len(words) << 16 | ord("F") << 8 | number
        assert self.do(f"out = ioctl({self.file}, c.c_ulong({request}), a), a[{status}]") == "(0, 0)"

    def free(self, handle: int) -> None:
        self.call(0x29, self.client, 0, handle, 0)

    def alloc(self, parent: int, handle: int, class_id: int) -> None:
        self.call(0x2B, self.client, parent, handle, class_id, *(0,) * 8, status=-2)

    def schedule(self, group: int, enable: int) -> None:
        self.do(f"enable[0] = {enable}")
        self.call(0x2A, self.client, group, 0xA06C0101, 0, "at % 2**32", "at >> 32", 3, 0)


def test_a_channel_group_is_listed_only_when_it_is_scheduled(cut_card: Card) -> None:
    lease = cut_card.lease("a", SharePolicy.NONE, 100)
    tenant = RawTenant(cut_card, lease)
    device, group, channel, compute = 0x5C000001, 0x5D000001, 0x5D000002, 0x5D000003
    for parent, handle, class_id in (
        (device, group, 0xA06C),
        (group, channel, 0xC86F),
        (channel, compute, 0xCBC0),
    ):
        tenant.alloc(parent, handle, class_id)
    listed = []
    for enable in (0, 1):
        tenant.schedule(group, enable)
        listed.append(len(table(lease)[1]))
    assert listed == [1, 2]


def test_a_process_is_preempted_only_when_all_channels_of_its_context_are_made(cut_card: Card) -> None:
    """If the arbiter disabled the first channels alone, kernels would run on the others until the end of the
    tenant's next time slice.
    """
    fault(cut_card, "slow", "--function", "FIFO_CHANNEL", "--microseconds", "100000")
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: table(lease)[0] == 1, "it is off")
    (channels,) = (
        use["channels"]
        for one in cut_card.sim.dump()["processes"]
        if one["pid"] == process.pid
        for use in one["uses"]
    )
    assert channels == 8


@pytest.mark.parametrize(
    ("mode", "priority"),
    [
        ("eager", 0),
        ("eager", 1),
        ("graph", 0),
        ("callbacks", 0),
        ("streams", 0),
        ("green", 0),
        ("cooperative", 0),
        ("cluster", 0),
    ],
)
def test_each_kind_of_kernel_launch_is_held_to_the_share(cut_card: Card, mode: str, priority: int) -> None:
    """A tenant with each of these modes of vgpu-spin uses no more than its share of 25 percent. The tenant
    with priority is preempted only while it has work and no share left.
    """
    lease = cut_card.lease("a", HARD, 25, priority=priority)
    is_cut_to(cut_card, lease, 25, cut_card.spin(lease, LONG, "--mode", mode).pid)


def test_two_work_conserving_tenants_divide_the_device_by_their_shares(cut_card: Card) -> None:
    small, large = cut_card.lease("a", CONSERVING, 25), cut_card.lease("b", CONSERVING, 75)
    for lease in (small, large):
        cut_card.spin(lease, LONG)
    divide(small, large, least=15, most=36)


def test_the_processes_of_a_tenant_have_one_share_together(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 30)
    pids = [cut_card.spin(lease, LONG).pid for _ in range(3)]
    for pid in pids:
        device_works(cut_card, pid)
    is_cut_to(cut_card, lease, 30, *pids)


def test_a_stopped_tenant_is_preempted(cut_card: Card) -> None:
    stopped, other = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    process = cut_card.spin(stopped, LONG)
    cut_card.spin(other, LONG)
    have_turns(stopped, other, turns=2)
    process.send_signal(signal.SIGSTOP)
    before = counters(stopped)["bypasses"]
    have_turns(other, turns=5)
    assert counters(stopped)["bypasses"] == before == 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_tenant_killed_while_preempted_leaves_no_channels(cut_card: Card, count: int) -> None:
    assert cut_card.arbiter is not None
    files = Path(f"/proc/{cut_card.arbiter.pid}/fd")
    lease = cut_card.lease("a", HARD, 5)
    before = len(list(files.iterdir()))
    processes = [cut_card.spin(lease, LONG) for _ in range(count)]
    eventually(lambda: [table(lease, slot)[0] for slot in range(count)] == [1] * count, "it is off")
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    eventually(lambda: channels_off(cut_card) == 0, "none is off")
    eventually(lambda: cut_card.client.list("a") == (), "the arbiter has none of its processes")
    eventually(lambda: len(list(files.iterdir())) <= before, "the arbiter has none of its files")
    device_works(cut_card, cut_card.spin(cut_card.lease("b", SharePolicy.NONE, 100), LONG).pid)


def test_a_preempted_tenant_enables_its_channels_itself_when_the_arbiter_dies(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 5)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: table(lease)[0] == 1, "it is off")
    cut_card.kill_arbiter()
    eventually(lambda: table(lease)[0] == 0, "it is back")
    assert process.poll() is None


def test_a_restarted_arbiter_continues_to_give_time_slices(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 25)
    process = cut_card.spin(lease, LONG)
    have_turns(lease)
    cut_card.kill_arbiter()
    cut_card.start_arbiter()
    is_cut_to(cut_card, lease, 25, process.pid)


def test_an_idle_tenant_gets_almost_no_time_slices(cut_card: Card) -> None:
    idle, other = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(idle, LONG, "--every-us", "600000000")
    eventually(lambda: counters(idle)["turns"] > 0, "it was there")
    process = cut_card.spin(other, LONG)
    device_works(cut_card, process.pid)
    turns = counters(idle)["turns"]
    device_works(cut_card, process.pid, milliseconds=500)
    assert counters(idle)["turns"] < turns + 5  # if the idle tenant had work, it would get ten slices


def test_a_tenant_that_backfills_runs_within_the_time_slices_of_another_tenant(cut_card: Card) -> None:
    """vgpu-spin runs for one second, so its figure is rough. test_model.py tests the scheduler's
    decisions.
    """
    gaps, full = cut_card.lease("a", CONSERVING, 50), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(full, LONG)
    half_a_slice_us = 25_000

    def most_requests_do_not_wait_for_the_next_slice() -> bool:
        line = answer(cut_card.spin(gaps, 1.0, "--every-us", "20000"))
        return bool(line["p50_us"] < half_a_slice_us)

    eventually(most_requests_do_not_wait_for_the_next_slice, "it backfills")


def test_each_request_of_a_priority_tenant_preempts_the_running_tenant(cut_card: Card) -> None:
    """The tenant reports at the end of each request that it is idle. After a late report, as on a busy
    machine, several requests share one slice.
    """
    first = cut_card.lease("a", CONSERVING, 40, priority=1)
    cut_card.spin(cut_card.lease("b", CONSERVING, 60), LONG)

    def most_requests_have_a_slice() -> bool:
        account = Accounts(first)
        requests = answer(cut_card.spin(first, 1.0, "--every-us", "10000"))["count"]
        return bool(account.since("turns")[0] > requests / 3)

    eventually(most_requests_have_a_slice, "it interrupts")


@pytest.mark.parametrize("how", ["reset", "release", "destroy", "green"])
def test_a_tenant_that_creates_and_destroys_contexts_is_held_to_its_share(cut_card: Card, how: str) -> None:
    """One process makes 100 contexts, each with work. A channel may be gone before the arbiter disables
    it.
    """
    lease = cut_card.lease("a", HARD, 50)
    said = answer(
        cut_card.program(str(TEST_BUILD / "context-cycles"), lease, how, "100", "2", "1000", "1000")
    )
    assert said["count"] == 100 and said["kernels"] >= 100
    assert counters(lease)["bypasses"] == 0


def test_a_tenant_with_forty_live_contexts_is_held_to_its_share(cut_card: Card) -> None:
    lease = cut_card.lease("a", HARD, 25)
    update_limits(lease, [replace(one, memory_bytes=64 * GIB) for one in cut_card.limits(HARD, 25)])
    cut_card.program(str(TEST_BUILD / "context-cycles"), lease, "live", "40", "60", "1000", "1000")
    eventually(lambda: len(table(lease)[1]) == 40, "40 groups are listed")
    eventually(lambda: table(lease)[0] == 1, "it is off")
    eventually(lambda: channels_off(cut_card) == 40 * 8, "with all of its channels")


def test_time_slices_of_a_tenant_with_40_contexts_last_much_longer_than_its_preemption(
    cut_card: Card,
) -> None:
    """Preempting or enabling 40 contexts takes five driver calls, which need at least 3 ms. The arbiter
    lengthens such a tenant's slices in proportion. A tenant with one context has slices of 8 ms.
    """
    lease = cut_card.lease("a", HARD, 25)
    update_limits(lease, [replace(one, memory_bytes=64 * GIB) for one in cut_card.limits(HARD, 25)])
    cut_card.program(str(TEST_BUILD / "context-cycles"), lease, "live", "40", "60", "1000", "1000")
    eventually(lambda: len(table(lease)[1]) == 40 and table(lease)[0] == 1, "40 groups are off")
    account = Accounts(lease)
    eventually(lambda: account.since("turns")[0] >= 8, "8 slices of 40 contexts")
    assert account.since("granted_ns")[0] >= 50e6 * account.since("turns")[0]


def test_a_tenant_with_40_contexts_does_not_lengthen_the_time_slices_of_its_neighbour(cut_card: Card) -> None:
    """The neighbour's slice stays at 50 ms, half of a round of 100 ms."""
    lease, neighbour = cut_card.lease("a", HARD, 25), cut_card.lease("b", HARD, 50)
    update_limits(lease, [replace(one, memory_bytes=64 * GIB) for one in cut_card.limits(HARD, 25)])
    cut_card.program(str(TEST_BUILD / "context-cycles"), lease, "live", "40", "60", "1000", "1000")
    cut_card.spin(neighbour, LONG)
    eventually(lambda: len(table(lease)[1]) == 40 and table(lease)[0] == 1, "40 groups are off")
    account = Accounts(neighbour)
    eventually(lambda: account.since("turns")[0] >= 8, "8 slices of the neighbour")
    assert account.since("granted_ns")[0] < 80e6 * account.since("turns")[0]


def channels_off(card: Card) -> int:
    pids = {process.pid for process in card.processes}
    uses = [use for one in card.sim.dump()["processes"] if one["pid"] in pids for use in one["uses"]]
    return sum(int(use["channels_off"]) for use in uses)


def test_two_jobs_of_two_ranks_share_two_devices(cut_card: Card, tmp_path: Path) -> None:
    """The kernels of each rank wait for the kernels of the other rank, so a job has both devices at the same
    time or neither.
    """
    leases = [cut_card.lease(name, CONSERVING, 50, devices=2) for name in "ab"]
    ranks = [pair(cut_card, tmp_path / lease.name, (lease, lease), "--think-us", "500") for lease in leases]
    for process in (process for job in ranks for process in job):
        assert answer(process)["steps"] > 0
    assert all(counters(lease)["bypasses"] == 0 for lease in leases)
    assert all(counters(lease, ordinal)["turns"] > 0 for lease in leases for ordinal in range(2))


@pytest.mark.parametrize("policy", [CONSERVING, SharePolicy.NONE])
def test_a_job_on_two_devices_and_a_tenant_on_one_of_them_take_turns(
    cut_card: Card, tmp_path: Path, policy: SharePolicy
) -> None:
    """The job is the only tenant of the second device, so that device has no time slices. The job's slices on
    the first device must end nevertheless.
    """
    job, other = cut_card.lease("a", policy, 50, devices=2), cut_card.lease("b", CONSERVING, 50)
    cut_card.spin(other, LONG)
    pair(cut_card, tmp_path / "page", (job, job), "--seconds", str(LONG))
    have_turns(job, other, turns=4)


def launches(lease: Path) -> int:
    raw = (lease / layout.USAGE_FILE).read_bytes()
    at = layout.USAGE_SLOTS + layout.SLOT_DEVICES + layout.SLOT_DEVICE_LAUNCHES
    return int(struct.unpack_from("<Q", raw, at)[0])


@pytest.mark.parametrize("policy", [HARD, SharePolicy.NONE])
def test_launches_are_counted_in_a_process_under_the_engine_cut(cut_card: Card, policy: SharePolicy) -> None:
    lease = cut_card.lease("a", policy, 50)
    cut_card.spin(lease, LONG)
    eventually(lambda: launches(lease) > 100, "launches are counted")


def test_100_000_hostile_handles_reach_no_channel_of_another_tenant(cut_card: Card) -> None:
    """Tenants list handles of another tenant, of an ended process, and random ones, mixed with their own. The
    arbiter makes at most 64 driver calls for an order, and after eight refused orders it enforces the
    tenant's share by the gate.
    """
    other = cut_card.lease("b", SharePolicy.NONE, 100, first_device=1)
    victim = cut_card.spin(other, LONG)
    eventually(lambda: len(table(other)[1]) == 1, "the other's channels are listed")
    known = list(table(other)[1])
    dice = random.Random(17)
    handles = 0
    for number in range(8):
        liar = cut_card.lease(f"a{number}", HARD, 10)
        process = cut_card.spin(liar, LONG)
        eventually(partial(lists_its_channels, liar), "its own are, too")
        known += table(liar)[1]
        at = layout.CHANNELS_AT + layout.CHANNELS_GROUPS
        uuid = (liar / layout.USAGE_FILE).read_bytes()[at:][:16]
        while cut_card.client.registered(liar.name).refusal == "":
            rows = hostile_rows(dice, known)
            with (liar / layout.USAGE_FILE).open("r+b") as page:
                os.pwrite(page.fileno(), b"".join(GROUP.pack(uuid, *row) for row in rows), at)
                os.pwrite(
                    page.fileno(), struct.pack("<I", len(rows)), layout.CHANNELS_AT + layout.CHANNELS_COUNT
                )
            (used,) = [p["uses"] for p in cut_card.sim.dump()["processes"] if p["pid"] == victim.pid]
            assert [(one["channels_off"], one["channels_repeated"]) for one in used] == [(0, 0)]
        handles += ORDERS * len(rows) * CHANNELS
        process.kill()
        process.wait()
    assert handles >= 100_000 and victim.poll() is None and cut_card.client.ready()


# ORDERS: after this many orders that the driver refuses, the arbiter no longer preempts the tenant.
# CHANNELS: the number of channels that one group in a table can list.
ORDERS, CHANNELS = 8, 8


def lists_its_channels(lease: Path) -> bool:
    return len(table(lease)[1]) == 1


def hostile_rows(dice: random.Random, known: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns false channel groups for a tenant's table. The fields of each group are taken at random from
    groups of other processes, from the tenant's own group (the last of `known`), or from random numbers.
    Eight groups in a row have the same file, client and subdevice, so the arbiter names them in one driver
    call.
    """
    rows = []
    for call in range(31):
        theirs = dice.choice(known[:-1])
        head = [dice.choice((theirs, known[-1]))[word] for word in range(3)]
        if call > 0 and dice.random() < 0.3:
            head[dice.randrange(3)] = dice.getrandbits(dice.choice((6, 32)))
        exact = dice.random() < 0.5
        for _ in range(8):
            channels = [theirs[4 + c] if exact else dice.getrandbits(32) for c in range(CHANNELS)]
            rows.append((*head, dice.choice((CHANNELS, dice.getrandbits(32) | CHANNELS)), *channels))
    return rows


def test_new_limits_reach_a_tenant_that_always_has_work(cut_card: Card) -> None:
    """The tenant sends no message that wakes the arbiter, and vgpud only writes the limits page."""
    lease = cut_card.lease("a", HARD, 10)
    cut_card.spin(lease, LONG)
    is_held_to(lease, 10)
    update_limits(lease, cut_card.limits(HARD, 80))
    is_held_to(lease, 80)


@pytest.mark.parametrize("word", ["client", "subdevice", "channel", "file"])
def test_channels_of_another_tenant_that_a_tenant_lists_are_not_disabled(cut_card: Card, word: str) -> None:
    """A tenant lists another tenant's channels as its own. The driver refuses the call, and the other tenant
    keeps running.
    """
    liar, other = cut_card.lease("a", HARD, 10), cut_card.lease("b", SharePolicy.NONE, 100, first_device=1)
    victim = cut_card.spin(other, LONG)
    eventually(lambda: len(table(other)[1]) == 1, "the other's channels are listed")
    group = list(table(other)[1][0])
    if word != "client":
        at = {"file": 0, "subdevice": 2, "channel": 4}[word]
        group[at] ^= 0x55
    process = cut_card.spin(liar, LONG)
    eventually(lambda: len(table(liar)[1]) == 1, "its own are, too")
    uuid = (liar / layout.USAGE_FILE).read_bytes()[layout.CHANNELS_AT + layout.CHANNELS_GROUPS :][:16]
    with (liar / layout.USAGE_FILE).open("r+b") as page:
        os.pwrite(page.fileno(), GROUP.pack(uuid, *group), layout.CHANNELS_AT + layout.CHANNELS_GROUPS)
    eventually(lambda: cut_card.client.registered("a").refusal != "", "calls with them were refused")
    (used,) = [p["uses"] for p in cut_card.sim.dump()["processes"] if p["pid"] == victim.pid]
    assert [one["channels_off"] for one in used] == [0]
    assert process.poll() is None and victim.poll() is None


@pytest.mark.parametrize("share", [5, 95])
def test_a_tenant_that_the_driver_refuses_to_preempt_keeps_its_share_by_the_gate(
    cut_card: Card, share: int
) -> None:
    """The driver refuses while the tenant is preempted (share 5 %), and while it is running (share 95 %). In
    neither case does the tenant stay preempted.
    """
    lease = cut_card.lease("a", HARD, share)
    process = cut_card.spin(lease, LONG)
    eventually(lambda: counters(lease)["turns"] > 5, "it has turns")
    assert cut_card.client.registered("a").refusal == ""
    fault(cut_card, "fail", "--function", "FIFO_DISABLE_CHANNELS", "--code", "86", "--count", "12")
    eventually(lambda: cut_card.client.registered("a").refusal == "status 0x56", "it is given up")
    eventually(lambda: table(lease)[0] == 0, "it is back on the card")
    turns = counters(lease)["turns"]
    eventually(lambda: counters(lease)["turns"] > turns + 5, "it has turns")
    assert table(lease)[0] == 0, "of the gate"
    update_limits(lease, cut_card.limits(HARD, 25))
    is_held_to(lease, 25)
    assert process.poll() is None


def test_driver_refusals_for_one_tenant_put_no_other_tenant_under_the_gate(cut_card: Card) -> None:
    """One tenant lists channels that do not exist. Its eight refusals put only this tenant under the gate."""
    liar, other = (cut_card.lease(name, CONSERVING, 50) for name in "ab")
    _, honest = (cut_card.spin(lease, LONG) for lease in (liar, other))
    eventually(lambda: all(counters(lease)["turns"] > 2 for lease in (liar, other)), "both have turns")
    at = layout.CHANNELS_AT + layout.CHANNELS_GROUPS + 16 + 4

    def is_given_up() -> bool:
        """Returns whether the arbiter no longer preempts the liar. Before each check the test writes the
        liar's false channel again, because libvgpu rewrites a group when one of its channels starts or ends.
        """
        with (liar / layout.USAGE_FILE).open("r+b") as page:
            os.pwrite(page.fileno(), struct.pack("<I", 0x1234), at)
        return cut_card.client.registered("a").refusal != ""

    eventually(is_given_up, "the liar is given up")
    assert cut_card.client.registered("b").refusal == ""
    device_works(cut_card, honest.pid)


def fault(card: Card, *words: str) -> None:
    command = [str(card.sim.build / "bin" / "vgpu-sim"), "fault", *words]
    subprocess.run(command, env=card.sim.environment(), check=True, timeout=300)
