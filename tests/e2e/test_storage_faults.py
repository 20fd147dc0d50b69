"""State directories that are full, read-only, or used by another daemon, or that contain foreign files."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests import prepared
from tests.conditions import needs
from tests.demo.node import DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, PROBE, allocate, client, eventually, quota, release, states
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.model.errors import ErrorCode, VgpuError


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "vgpud-test", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Writes a file until the file system is full."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(4096))
        except OSError:
            return ballast


def start_and_fail(node: DemoNode) -> subprocess.CompletedProcess[str]:
    """Starts a daemon whose start is expected to fail."""
    return prepared.ended_daemon(node.environment)


class TestMounted:
    pytestmark = needs("root", "namespaces")

    def test_a_full_disk_refuses_allocations_until_space_is_free(self, make_node: NodeMaker) -> None:
        node = make_node()
        with tmpfs(node.folder / "state", "size=512k"):
            node.start()
            held = [quota(node, request_id=f"before-{n}").id for n in range(2)]
            ballast = fill(node.folder / "state")
            for attempt in range(3):
                refused = node.ctl(
                    *("alloc", "--isolation", "quota", "--memory", "1GiB", "--request-id", f"full-{attempt}"),
                    check=False,
                )
                if refused.returncode:
                    break
            assert refused.returncode == 70, refused.stderr
            assert "E701" in refused.stderr
            assert "hint:" in refused.stderr
            with client(node) as calls, pytest.raises(VgpuError) as unreleased:
                for allocation in held:
                    calls.release(allocation)
            assert unreleased.value.code is ErrorCode.LEDGER_FULL
            with client(node) as calls, pytest.raises(VgpuError) as not_resized:
                calls.resize(held[1], 2 * GIB)
            assert not_resized.value.code is ErrorCode.LEDGER_FULL
            assert set(states(node).values()) <= {"active"}, "what could not be written did not happen"
            assert node.ctl("status", check=False).returncode == 0
            ballast.unlink()
            with client(node) as calls:
                again = calls.resize(held[1], 2 * GIB)
            assert again.slices[0].memory_bytes == 2 * GIB
            release(node, *states(node))
            node.kill()
            node.start()
            assert states(node) == {}
            assert node.stop() == 0

    def test_vgpud_refuses_to_start_on_a_full_disk(self, make_node: NodeMaker) -> None:
        node = make_node()
        with tmpfs(node.folder / "state", "size=64k"):
            ballast = fill(node.folder / "state")
            refused = start_and_fail(node)
            assert refused.returncode == 70, refused.stderr
            assert "E701" in refused.stderr
            assert "Traceback" not in refused.stderr
            ballast.unlink()
        with tmpfs(node.folder / "state", "size=1m"):
            node.start()
            release(node, quota(node).id)
            assert node.stop() == 0

    def test_vgpud_refuses_to_start_on_a_read_only_state_directory(self, make_node: NodeMaker) -> None:
        node = make_node()
        with tmpfs(node.folder / "state", "size=1m"):
            node.start()
            held = quota(node)
            node.stop()
            remount = ["mount", "-o", "remount,ro", str(node.folder / "state")]
            subprocess.run(remount, check=True)
            refused = start_and_fail(node)
            assert refused.returncode == 70, refused.stderr
            assert "E702" in refused.stderr
            assert str(node.folder / "state") in refused.stderr
            assert "Traceback" not in refused.stderr
            assert (node.run_dir / "leases" / held.id / "limits").exists(), "its tenants are left alone"
            subprocess.run([*remount[:2], "remount,rw", remount[3]], check=True)
            node.start()
            assert states(node) == {held.id: "active"}
            release(node, held.id)
            assert node.stop() == 0


def test_a_second_daemon_on_the_same_state_is_refused(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    tenant = node.tenant(
        ["--isolation", "quota", "--memory", "1GiB", "--device", "0"],
        [PROBE, "hold", "64MiB", "--then-wait-on-stdin"],
    )
    tenant.line()
    before = states(node)
    assert node.daemon is not None
    refused = start_and_fail(node)
    assert refused.returncode == 35, refused.stderr
    assert "E705" in refused.stderr
    assert str(node.daemon.pid) in refused.stderr
    unharmed(node, before)
    tenant.end()


@pytest.mark.parametrize("own", ["VGPUD_STATE_DIR", "VGPUD_RUN_DIR"])
def test_a_second_daemon_that_shares_one_directory_is_refused(make_node: NodeMaker, own: str) -> None:
    """The second daemon shares either the state directory or the run directory of the first."""
    node = make_node()
    node.start()
    mps = allocate(node, isolation="compute", memory_bytes=GIB, selector=pb.Selector(indices=[1]))
    before = {**states(node), quota(node).id: "active"}
    second = DemoNode(environment=node.environment)
    second.environment = {**node.environment, own: str(second.folder / "other")}
    refused = start_and_fail(second)
    second.remove()
    assert refused.returncode != 0
    assert "hint:" in refused.stderr
    assert "Traceback" not in refused.stderr
    unharmed(node, before)
    release(node, *before)
    assert mps.id in before


def unharmed(node: DemoNode, before: dict[str, str]) -> None:
    assert states(node) == before
    with client(node) as calls:
        held = calls.list_allocations().allocations
    leased = {a.id for a in held if a.slices[0].mode == "preload"}
    assert {p.name for p in (node.run_dir / "leases").iterdir()} == leased
    assert len(list((node.folder / "cdi").glob("*.json"))) == len(before)
    assert len(list((node.run_dir / "units").glob("vgpud-mps@*.pid"))) == len(before) - len(leased)
    extra = quota(node)
    release(node, extra.id)


def test_foreign_files_in_the_lease_directory_are_neither_read_nor_followed(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    """vgpud ignores foreign files both at its start and while it runs."""
    node = make_node()
    node.start()
    held = quota(node)
    node.kill()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    leases = node.run_dir / "leases"
    (leases / "link").symlink_to(precious)
    (leases / ".link.new").symlink_to(precious)
    (leases / "file").write_text("no lease")
    (leases / "name\nwith\tblanks").mkdir()
    (leases / "0123456789ab").mkdir()
    (leases / "0123456789ab" / "link").symlink_to(precious)
    (leases / "0123456789ab" / "limits").symlink_to(precious / "file")
    os.mkfifo(leases / "pipe")
    dangling = leases / "feedfeedfeed"
    dangling.symlink_to("/nonexistent")
    node.start()
    assert states(node) == {held.id: "active"}
    assert not (leases / "0123456789ab").exists(), "a lease that no allocation owns is removed"
    assert (precious / "file").read_text() == "kept"
    release(node, held.id)
    release(node, quota(node).id)
    assert (precious / "file").read_text() == "kept"


def becomes_a_pipe(usage: Path) -> None:
    usage.unlink()
    os.mkfifo(usage)


def becomes_a_link(usage: Path) -> None:
    usage.unlink()
    usage.symlink_to("/dev/zero")


def becomes_a_directory(usage: Path) -> None:
    usage.unlink()
    (usage / "x").mkdir(parents=True)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "scribbled": lambda usage: usage.write_bytes(os.urandom(usage.stat().st_size)),
    "all ones": lambda usage: usage.write_bytes(b"\xff" * usage.stat().st_size),
    "cut short": lambda usage: os.truncate(usage, 10),
    "huge": lambda usage: os.truncate(usage, 1 << 42),
    "a pipe": becomes_a_pipe,
    "a link": becomes_a_link,
    "a directory": becomes_a_directory,
    "gone": Path.unlink,
}


def test_a_hostile_usage_file_harms_no_other_tenant(make_node: NodeMaker) -> None:
    """Root in a container owns its lease directory, so a tenant can damage the usage file in any way."""
    node = make_node()
    node.start()
    for how, hurt in HOSTILE.items():
        held, neighbour = quota(node), quota(node, 2)
        hurt(node.run_dir / "leases" / held.id / "usage")
        with client(node, timeout_seconds=300) as calls:
            assert calls.get_allocation(held.id).state == "active", how
            calls.resize(held.id, 3 * GIB)
            assert [part.pids for part in calls.get_allocation(neighbour.id).use] == [[]], how
        filled = node.tenant(
            ["--isolation", "quota", "--memory", "1GiB", "--device", "0"],
            [PROBE, "fill", "--piece", "64MiB"],
        )
        assert filled.line()["result"] == "CUDA_ERROR_OUT_OF_MEMORY", how
        filled.end()
        release(node, held.id, neighbour.id)
        eventually(lambda: states(node) == {}, how)
        assert list((node.run_dir / "leases").iterdir()) == [], how
    assert node.stop() == 0


def test_a_lease_with_a_deep_tree_of_folders_is_released(make_node: NodeMaker) -> None:
    node = make_node()
    node.start()
    held = quota(node)
    lease = node.run_dir / "leases" / held.id
    here = os.open(lease, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    place = lease.resolve()
    try:
        release(node, held.id)
        assert not lease.exists()
        eventually(lambda: not any(place.parent.glob(f"*{held.id}*")), "the tree is removed")
    finally:
        subprocess.run(["rm", "-rf", lease, *place.parent.glob(f"*{held.id}*")], check=True)
    assert node.stop() == 0


def test_vgpud_refuses_a_state_directory_that_is_a_file(make_node: NodeMaker) -> None:
    node = make_node()
    (node.folder / "state").write_text("")
    refused = start_and_fail(node)
    assert refused.returncode in (70, 78)
    assert str(node.folder / "state") in refused.stderr
    assert "Traceback" not in refused.stderr


def test_vgpud_refuses_a_broken_ledger_and_leaves_it_unchanged(make_node: NodeMaker) -> None:
    """vgpud leaves a broken ledger unchanged, so that an administrator can repair it."""
    node = make_node()
    node.start()
    quota(node)
    node.stop()
    ledger = node.folder / "state" / "ledger.db"
    whole = ledger.read_bytes()
    ledger.write_bytes(b"\0" * len(whole))
    refused = start_and_fail(node)
    assert refused.returncode == 78, refused.stderr
    assert "E703" in refused.stderr
    assert ledger.read_bytes() == b"\0" * len(whole)
    ledger.write_bytes(whole)
    node.start()
    release(node, *states(node))
    shutil.rmtree(node.folder / "state", ignore_errors=True)


@pytest.mark.parametrize("row", ["mig_instances VALUES (?, 'x', '')", "mig_layouts VALUES (?, '19@0')"])
def test_vgpud_refuses_a_ledger_that_names_no_mig_instance(make_node: NodeMaker, row: str) -> None:
    node = make_node()
    node.start()
    with client(node) as calls:
        uuid = calls.list_devices().devices[0].uuid
    node.stop()
    with closing(sqlite3.connect(node.folder / "state" / "ledger.db")) as ledger:
        ledger.execute(f"INSERT INTO {row}", (uuid,))
        ledger.commit()
    refused = start_and_fail(node)
    assert refused.returncode == 78, refused.stderr
    assert "E703" in refused.stderr
    assert "Traceback" not in refused.stderr
