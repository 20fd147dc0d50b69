"""Kernels that wait for the kernel of another rank, as in a collective operation, or for the host
(native/probe/pair.c).
"""

import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arbiter.accounts import have_turns, is_bypassed_seldom
from tests.arbiter.conftest import LONG, Card, answer, counters
from tests.e2e.support import eventually
from vgpud.lease import SharePolicy

HARD, CONSERVING, NONE = SharePolicy.HARD, SharePolicy.WORK_CONSERVING, SharePolicy.NONE


@pytest.fixture
def pages() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def pair(
    card: Card, page: Path, leases: tuple[Path, Path], *words: str, seconds: float = 1.0
) -> "list[subprocess.Popen[str]]":
    page.write_bytes(bytes(4096))
    words = ("--file", str(page), "--seconds", f"{seconds}", *words)
    return [
        card.program("vgpu-pair", lease, "--rank", rank, *words, *device)
        for rank, lease, device in zip(("0", "1"), leases, devices_of(leases), strict=True)
    ]


def begun_steps(page: Path) -> int:
    """Number of the last step that the kernels of both ranks have begun."""
    words = struct.unpack_from("<Q504xQ", page.read_bytes())
    return int(min(words))


def devices_of(leases: tuple[Path, Path]) -> list[tuple[str, str]]:
    """Device arguments of two ranks: the two devices of one lease, or the only device of each of two
    leases.
    """
    second = "1" if leases[0] == leases[1] else "0"
    return [("--device", "0"), ("--device", second)]


@pytest.mark.parametrize("policy", [HARD, CONSERVING, NONE])
def test_two_jobs_of_two_ranks_share_the_same_two_devices(
    card: Card, pages: Path, policy: SharePolicy
) -> None:
    leases = [card.lease(name, policy, 50, devices=2) for name in "ab"]
    ranks = [pair(card, pages / lease.name, (lease, lease), "--think-us", "500") for lease in leases]
    for process in (process for job in ranks for process in job):
        said = answer(process)
        assert said["libvgpu"] is True
        assert said["steps"] > 0, said


@pytest.mark.parametrize("work", ["0", "1", "3"])
def test_a_lone_job_of_two_ranks_makes_progress_under_a_hard_share(
    card: Card, pages: Path, work: str
) -> None:
    """The job's slices end on both devices in the middle of steps, even of very short ones. A waiting rank
    must not block the other rank until a bypass.
    """
    lease = card.lease("a", HARD, 25, devices=2)
    pair(card, pages / "a", (lease, lease), "--work", work, seconds=LONG)
    is_bypassed_seldom(lease)
    steps = begun_steps(pages / "a")
    eventually(lambda: begun_steps(pages / "a") > steps + 1, "both ranks go on")


def test_ranks_in_separate_leases_make_progress_because_the_wait_for_unfinished_kernels_is_bounded(
    card: Card, pages: Path
) -> None:
    """The arbiter cannot know that the two leases belong together: one rank may have its slice while the
    other waits for one. The kernel of the first rank then does not end, and after a bounded wait the arbiter
    admits the other rank.
    """
    first = [card.lease(f"a{d}", CONSERVING, 50, first_device=d) for d in range(2)]
    second = [card.lease(f"b{d}", CONSERVING, 50, first_device=d) for d in range(2)]
    ranks = [
        *pair(card, pages / "a", (first[0], first[1])),
        *pair(card, pages / "b", (second[0], second[1])),
    ]
    for process in ranks:
        assert answer(process)["steps"] > 0  # the program fails if a kernel waits for ever


def test_the_arbiter_bypasses_a_kernel_that_waits_for_its_host_and_counts_it(card: Card) -> None:
    waiting, living = card.lease("a", CONSERVING, 50), card.lease("b", CONSERVING, 50)
    card.spin(living, LONG)
    eventually(lambda: counters(living)["turns"] > 0, "the other tenant wants the card")
    spinner = card.program("vgpu-pair", waiting, "--rank", "0", "--host-ms", "400", "--seconds", "2")
    eventually(lambda: counters(waiting)["bypasses"] >= 1, "a bypass")
    have_turns(living, turns=2)
    assert answer(spinner)["steps"] > 0
