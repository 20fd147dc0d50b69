"""Ordinary programs (tests/gpu/strangers.c) run inside a compute share as they do without one."""

import errno
import subprocess
from pathlib import Path

import pytest

from tests.arbiter.conftest import Card, made_card
from tests.arbiter.test_edges import OPERATING_SYSTEM, WAIT_S, environment, lease_of
from tests.arbiter.test_edges import run as run_preloaded
from tests.e2e.support import eventually
from tests.native.harness import TEST_BUILD
from vgpud.lease import read_usage

SLOW_OPEN = TEST_BUILD / "libslow_open.so"
#: System calls whose failure libvgpu tolerates.
CALLS = ("ppoll", "connect", "prctl", "setsockopt", "madvise", "sched_yield")


def run(card: Card, lease: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(TEST_BUILD / "strangers"), *words],
        env=environment(card, lease),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "way", ["forks", "reload", "tiny-stacks", "vfork", "closefrom", "exit", "graphs", "sealed"]
)
def test_each_ordinary_program_is_limited_and_runs_to_its_end(card: Card, way: str) -> None:
    lease = lease_of(card)
    done = run(card, lease, way)
    assert (done.returncode, done.stderr) == (0, "at exit\n" if way == "exit" else "")
    eventually(lambda: read_usage(lease).processes == (), "no slot is left")


def test_a_programs_file_stays_open_at_a_descriptor_number_that_libvgpu_has_just_used(card: Card) -> None:
    """While libvgpu's thread opens the lease again, the program closes all descriptors and opens its own
    file, which gets the first free number.
    """
    done = run_preloaded(card, lease_of(card), "strangers", "closefrom", preload=str(SLOW_OPEN))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_that_closes_the_files_of_its_lease_is_limited(card: Card) -> None:
    """tests.gpu.edges_h200 runs the same on a card, whose driver needs files of its own."""
    lease = lease_of(card)
    done = run(card, lease, "closefrom", str(lease))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("engine", ["cut", "gate"])
def test_a_launch_without_a_context_is_refused_at_once(engine: str) -> None:
    with made_card(engine) as card:
        done = run(card, lease_of(card), "orphans")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("engine", ["cut", "gate"])
def test_a_cancelled_thread_leaves_no_lock_of_libvgpu_behind(engine: str) -> None:
    with made_card(engine) as card:
        done = run(card, lease_of(card), "cancelled")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("descriptors", [3, 5, 7, 9, 16])
def test_a_process_with_few_descriptors_is_limited_or_refused(card: Card, descriptors: int) -> None:
    done = run(card, lease_of(card), "limits", str(descriptors))
    refused = done.returncode == 1 and done.stderr.endswith(f": {OPERATING_SYSTEM}\n")
    assert refused or (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_is_forbidden_a_system_call_is_still_limited(card: Card, call: str) -> None:
    lease = lease_of(card)
    for error in (errno.EPERM, errno.ENOSYS):
        done = run(card, lease, "deny", call, str(error))
        assert (done.returncode, done.stderr) == (0, "")


def test_memory_of_dead_processes_that_never_registered_is_given_back(card: Card) -> None:
    """A system-call filter kept these processes from connecting, so the arbiter is not told of their end."""
    lease = lease_of(card)
    # each process ends with the memory of a context still counted in its slot; the lease has room for three
    for _ in range(8):
        done = run(card, lease, "deny", "connect", str(errno.EPERM))
        assert (done.returncode, done.stderr) == (0, "")
    done = run(card, lease, "forks")
    assert (done.returncode, done.stderr) == (0, "")
