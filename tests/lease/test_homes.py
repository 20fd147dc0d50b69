"""A user's tenants use up no file system that another user's leases are on."""

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.lease.conftest import Node, eventually
from tests.native.harness import GIB, GID, MIB, PROBE, UID, UUIDS
from tests.simnode import ROOT
from vgpud.lease import DeviceLimits, lease_home, list_leases, remove_lease, write_lease
from vgpud.lease.homes import home_for
from vgpud.model.errors import VgpuError
from vgpud.model.tenancy import ANYONE

DEVICES = (DeviceLimits(UUIDS[0], GIB),)
MOUNT = """
for n in 0 1; do
    mkdir -p "$1/tenants/$n" && mount -t tmpfs -o mode=0711,size=16m,nr_inodes=100 vgpud "$1/tenants/$n"
    mkdir -m 0711 "$1/tenants/$n/leases"
done
exec "$2" -c "$3" "$1"
"""
PRELUDE = """
import asyncio, os, sys
from pathlib import Path
from tests.lease.test_homes import lease
from vgpud import lease_layout as layout
from vgpud.lease import remove_lease
from vgpud.model.tenancy import ANYONE
root = Path(sys.argv[1]) / "leases"
root.mkdir()
def grown(folder, after_its_end):
    "An attack: fills the file system of a lease. Returns the open file."
    usage = os.open(folder / "usage", os.O_RDWR)
    if after_its_end:
        asyncio.run(remove_lease(root, folder.name))
    chunk = bytes(1 << 20)
    try:
        while True:
            os.pwrite(usage, chunk, os.fstat(usage).st_size)
    except OSError:
        return usage
def every_page(folder):
    usage = os.open(folder / "usage", os.O_RDWR)
    os.posix_fallocate(usage, 0, layout.USAGE_FILE_SIZE)
    os.close(usage)
"""


def lease(root: Path, name: str, uid: int, user: int | None = None) -> Path:
    return write_lease(lease_home(root, name, uid if user is None else user), name, DEVICES, uid, GID)


def mounted(folder: Path, script: str) -> None:
    """Runs the script where the run folder `folder` has two file systems for users."""
    words = ["unshare", "-m", "sh", "-ec", MOUNT, "sh", str(folder), sys.executable, PRELUDE + script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@needs("root", "namespaces")
def test_a_container_of_root_that_fills_a_file_system_takes_no_page_of_another(tmp_path: Path) -> None:
    script = """
there, hostile = lease(root, "there", 0), lease(root, "hostile", 0)
held = grown(hostile, True)
every_page(there)
"""
    mounted(tmp_path, script)


@needs("root", "namespaces")
@pytest.mark.parametrize("after_its_end", [False, True])
def test_a_tenant_that_fills_the_file_system_of_its_usage_file_takes_no_page_of_another_user(
    tmp_path: Path, after_its_end: bool
) -> None:
    script = f"""
there = lease(root, "there", 7002)
held = grown(lease(root, "hostile", 7001), {after_its_end})
every_page(there)
every_page(lease(root, "later", 7002))
"""
    mounted(tmp_path, script)


@needs("root", "namespaces")
def test_a_user_whose_removed_files_stay_open_gets_no_second_file_system(tmp_path: Path) -> None:
    script = """
held = []
for number in range(3):
    held.append(grown(lease(root, f"hostile-{number}", 100_000 + number, 7001), True))
    os.ftruncate(held[-1], 0)
grown(lease(root, "hostile", 7001), True)
every_page(lease(root, "other", 7002))
"""
    mounted(tmp_path, script)


@needs("root", "namespaces")
def test_a_file_system_goes_to_another_user_when_nothing_is_left_on_it(tmp_path: Path) -> None:
    script = """
def end(folder):
    asyncio.run(remove_lease(root, folder.name))
first, second = lease(root, "first", 7001), lease(root, "second", 7002)
assert first.parent != second.parent
third = lease(root, "third", 7003)
end(third)
usage = os.open(first / "usage", os.O_RDONLY)
end(first)
end(second)
assert lease(root, "fourth", 7004).parent == second.parent
os.close(usage)
assert lease(root, "fifth", 7005).parent == first.parent
"""
    mounted(tmp_path, script)


@needs("root", "namespaces")
def test_a_user_that_shares_a_file_system_gets_an_empty_one_with_a_later_lease(tmp_path: Path) -> None:
    script = """
first = os.open(lease(root, "first", ANYONE) / "usage", os.O_RDONLY)
second = os.open(lease(root, "second", 7002) / "usage", os.O_RDONLY)
places = {os.fstat(first).st_dev, os.fstat(second).st_dev}
assert len(places) == 2
for name in ("first", "second"):
    asyncio.run(remove_lease(root, name))
guest = lease(root, "guest", 7003)
kept, ended = (first, second) if guest.stat().st_dev == os.fstat(first).st_dev else (second, first)
assert lease(root, "guest-2", 7003).parent == guest.parent
os.close(ended)
alone = lease(root, "guest-3", 7003)
assert alone.parent != guest.parent
assert lease(root, "guest-4", 7003).parent == alone.parent
"""
    mounted(tmp_path, script)


def made_homes(run_dir: Path) -> list[Path]:
    """Folders in place of file systems, which count as never empty."""
    (run_dir / "leases").mkdir()
    made = [run_dir / "tenants" / str(number) / "leases" for number in range(2)]
    for home in made:
        home.mkdir(parents=True)
    return made


def test_users_and_containers_share_the_file_systems_with_the_fewest_leases(tmp_path: Path) -> None:
    homes, root = made_homes(tmp_path), tmp_path / "leases"
    places = [lease(root, f"a{number}", ANYONE).parent.parent for number in range(4)]
    assert sorted(places) == sorted(homes * 2)
    own = home_for(root, "7001")
    for number in range(3):
        assert home_for(root, f"{7002 + number}") in homes
        assert home_for(root, "7001") == own


def test_a_container_leaves_no_name_on_the_file_system(tmp_path: Path) -> None:
    homes, root = made_homes(tmp_path), tmp_path / "leases"
    lease(root, "a1", ANYONE)
    asyncio.run(remove_lease(root, "a1"))
    assert [path for home in homes for path in home.parent.iterdir() if path != home] == []


def test_a_lease_whose_link_cannot_be_made_leaves_nothing_and_can_be_made_later(tmp_path: Path) -> None:
    homes, root = made_homes(tmp_path), tmp_path / "leases"
    root.rmdir()
    with pytest.raises(VgpuError):
        lease(root, "a1", UID)
    assert [path for home in homes for path in home.iterdir()] == []
    root.mkdir()
    folder = lease(root, "a1", UID)
    (root / "a1").unlink()
    assert write_lease(folder.parent, "a1", DEVICES, UID, GID) == folder
    assert (root / "a1").resolve() == folder


def test_a_lease_that_cannot_be_written_leaves_nothing_on_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes, root = made_homes(tmp_path), tmp_path / "leases"

    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(VgpuError):
        patched.setattr("vgpud.lease.pages.os.ftruncate", full)
        lease(root, "a1", UID)
    asyncio.run(remove_lease(root, "a1"))
    assert [path for home in (root, *homes) for path in home.iterdir()] == []


def test_what_interrupted_writes_and_removals_leave_on_a_file_system_is_removed(tmp_path: Path) -> None:
    homes, root = made_homes(tmp_path), tmp_path / "leases"
    for name in ("kept", "unlinked", "gone"):
        lease(root, name, UID, 7001)
    (home,) = (home for home in homes if any(home.iterdir()))
    (root / "unlinked").unlink()
    (home / "gone").rename(home / ".gone.new")
    assert list_leases(root) == {"kept"}
    assert [path.name for path in home.iterdir()] == ["kept"]
    assert [path.name for path in root.iterdir()] == ["kept"]
    asyncio.run(remove_lease(root, "kept"))
    assert not any(root.iterdir())
    assert not any(home.iterdir())


@pytest.fixture
def node_with_homes() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a short path, for the sockets
        made_homes(Path(folder))
        node = Node(Path(folder))
        node.start_arbiter()
        yield node
        node.end()


def test_the_arbiter_serves_leases_on_file_systems_of_users(node_with_homes: Node) -> None:
    node, root = node_with_homes, node_with_homes.run_dir / "leases"
    folder = lease(root, "a1", UID)
    assert (root / "a1").resolve() == folder
    node.client.add("a1")
    tenant = node.tenant(folder, PROBE, "hold", str(100 * MIB), "--then-wait-on-stdin")
    assert tenant.stdout is not None
    assert "held" in tenant.stdout.readline()
    eventually(lambda: node.client.list("a1") == (tenant.pid,))
    node.kill_arbiter()
    node.start_arbiter()
    eventually(lambda: node.client.list("a1") == (tenant.pid,))
    usage = os.open(folder / "usage", os.O_RDWR)
    try:
        os.pwrite(usage, b"x", os.fstat(usage).st_size + 64 * MIB)
        eventually(lambda: node.client.registered("a1").cuts > 0)
    finally:
        os.close(usage)
