"""A lease whose tenant has an unknown uid, as in a pod: every user inside the pod can use it, and no user of
the host.
"""

import json
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.lease.conftest import Node, eventually, lease_used
from tests.native.harness import CONTEXT_BYTES, GIB, MIB, PROBE, UUIDS, Tenant
from tests.otheruser import as_user, open_folder
from vgpud import lease_layout
from vgpud.lease import DeviceLimits, read_usage, write_lease
from vgpud.model.tenancy import ANYONE

pytestmark = needs("root")

NOBODY = 65534
# Mounts the lease as a container runtime does: the folder read-only and its usage page writable. The arbiter
# accepts processes of any user that have the lease mounted at this path.
MOUNT = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p "$2"
mount --bind "$1" "$2"
mount -o remount,bind,ro "$2"
touch "$3"
mount --bind "$1/usage" "$3"
shift 3
exec "$@"
"""


@pytest.fixture
def node() -> Iterator[Node]:
    """A node in a folder that every user may enter, so that only the lease's own permissions protect it."""
    with open_folder() as run_dir:
        (run_dir / "leases").mkdir()
        (run_dir / "leases").chmod(0o755)
        node = Node(run_dir)
        node.start_arbiter()
        yield node
        node.end()


@pytest.fixture
def lease(node: Node) -> Path:
    folder = write_lease(node.run_dir / "leases", "p1", [DeviceLimits(UUIDS[0], GIB)], ANYONE, ANYONE)
    node.client.add("p1")
    return folder


def as_stranger(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Runs `command` as an unprivileged user of the host."""
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "util-linux's setpriv is not installed"
    user = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    return subprocess.run([*user, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["usage", "arbiter.sock"])
def test_users_of_the_host_cannot_open_a_lease_of_unknown_uid(node: Node, lease: Path, name: str) -> None:
    assert as_stranger("ls", node.run_dir / "leases").returncode == 0
    assert stat.S_IMODE((lease / name).stat().st_mode) == 0o666
    looked = as_stranger("stat", lease / name)
    assert looked.returncode != 0
    assert "Permission denied" in looked.stderr
    written = as_stranger("sh", "-c", 'exec 3>>"$1"', "sh", lease / name)
    assert "Permission denied" in written.stderr


def within(node: Node, lease: Path, *command: str | Path) -> "subprocess.Popen[str]":
    """Runs `command` as an unprivileged user in a mount namespace with the lease, as in a container."""
    mounted = Path(lease_layout.MOUNT)
    env = ["env", "-i", *(f"{name}={value}" for name, value in Tenant(mounted).env().items())]
    shell: list[str | Path] = ["unshare", "-m", "sh", "-c", MOUNT, "sh"]
    mount = [*shell, lease, mounted, lease_layout.USAGE_MOUNT]
    process = subprocess.Popen(
        [*mount, *as_user(NOBODY, NOBODY), *env, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    node.processes.append(process)
    return process


def test_a_user_in_the_container_registers_and_is_limited(node: Node, lease: Path) -> None:
    process = within(node, lease, PROBE, "fill", "--piece", "32MiB", "--keep", "--then-wait-on-stdin")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    assert json.loads(line)["total_bytes"] == GIB - CONTEXT_BYTES
    assert Path(f"/proc/{process.pid}").stat().st_uid == NOBODY
    eventually(lambda: node.client.list("p1") == (process.pid,))
    (slot,) = read_usage(node.run_dir / "leases" / "p1").processes
    assert slot.registered
    assert lease_used(lease) == GIB
    process.kill()
    process.wait()
    eventually(lambda: lease_used(lease) == 0 and node.client.list("p1") == ())


def test_a_restarted_arbiter_serves_a_lease_of_unknown_uid(node: Node, lease: Path) -> None:
    process = within(node, lease, PROBE, "hold", "256MiB", "--then-wait-on-stdin")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["state"] == "held"
    node.kill_arbiter()
    node.start_arbiter()
    eventually(lambda: node.client.list("p1") == (process.pid,))
    eventually(lambda: [p.registered for p in read_usage(lease).processes] == [True])
    assert lease_used(lease) == CONTEXT_BYTES + 256 * MIB
