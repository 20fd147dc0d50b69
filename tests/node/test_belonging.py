"""The rules by which a process belongs to a tenant, tested with real processes. vgpud suspends, moves and
ends only processes of the tenant.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.conditions import needs
from vgpud.model.quantity import GIB
from vgpud.model.tenancy import (
    ANYONE,
    Allocation,
    Lifetime,
    Mode,
    Owner,
    Request,
    Slice,
    State,
    SuspendedProcess,
)
from vgpud.modes.preload import CONTAINER_LEASE
from vgpud.node.tenants import belonging
from vgpud.node.tenants.belonging import belongs
from vgpud.proc import mounts_at, start_ticks

TENANT, STRANGER = 4242, 4343
AS_USER = """
import os, sys
uid, effective = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, effective, effective)
print("up", flush=True); input()
"""
IN_A_USER_NAMESPACE = """
import ctypes, os
os.setgroups([]); os.setresgid(4242, 4242, 4242); os.setresuid(4242, 4242, 4242)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("up", flush=True); input()
"""
WITH_THE_LEASE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x44000, None) == 0
assert libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None) == 0
os.makedirs(sys.argv[1]); os.makedirs("/run/vgpud/leases/" + sys.argv[2])
assert libc.mount(("/run/vgpud/leases/" + sys.argv[2]).encode(), sys.argv[1].encode(), None, 4096, None) == 0
os.setresuid(4343, 4343, 4343)
print("up", flush=True); input()
"""
# /proc/PID/mountinfo shows each space of a path in four bytes, so the mounts at the long path have 1.2 MiB
# there
AND_MANY_MOUNTS = """
place = ("/run" + 12 * ("/" + 250 * " ")).encode(); os.makedirs(place)
for _ in range(100): assert libc.mount(b"tmpfs", place, b"tmpfs", 0, None) == 0
"""
# In a user namespace any user of the host can mount a folder with the name of a lease.
WITH_A_FORGED_LEASE = """
import ctypes, os, sys
os.setgroups([]); os.setresgid(4343, 4343, 4343); os.setresuid(4343, 4343, 4343)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(4, 1) == 0 and libc.unshare(0x10020000) == 0
for name, line in ("setgroups", "deny"), ("uid_map", "0 4343 1"), ("gid_map", "0 4343 1"):
    with open("/proc/self/" + name, "w") as table: table.write(line)
assert libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None) == 0
os.makedirs(sys.argv[1]); os.makedirs("/run/leases/" + sys.argv[2])
assert libc.mount(("/run/leases/" + sys.argv[2]).encode(), sys.argv[1].encode(), None, 4096, None) == 0
print("up", flush=True); input()
"""
SANDBOX_IN_A_CONTAINER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
inner = os.fork()
if not inner:
    os.setresuid(4343, 4343, 4343)
    assert libc.unshare(0x10020000) == 0
    print("up", os.getpid(), flush=True); input(); os._exit(0)
os.waitpid(inner, 0)
"""

pytestmark = needs("root")


@contextmanager
def running(code: str, *words: object) -> Iterator[SuspendedProcess]:
    told = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin and child.stdout
        try:
            word, *inner = child.stdout.readline().split()
            assert word == "up"
            pid = int(inner[0]) if inner else child.pid
            yield SuspendedProcess(pid, start_ticks(pid) or 0, 0)
        finally:
            child.communicate("\n")


def held(uid: int = TENANT, cgroup: str = "") -> Allocation:
    request = Request("r", Owner(uid, uid), lifetime=Lifetime(cgroup=cgroup))
    return Allocation("a1", request, State.ACTIVE, (Slice("GPU-1", Mode.EXCLUSIVE, GIB),))


def test_a_process_of_the_owners_uid_belongs_to_the_tenant_and_one_of_another_user_does_not() -> None:
    with running(AS_USER, TENANT, TENANT) as process:
        assert belongs(process, held())
        assert not belongs(process, held(STRANGER))
        assert not belongs(process, held(0))


def test_a_set_uid_program_that_the_owner_runs_does_not_belong_to_the_tenant() -> None:
    with running(AS_USER, TENANT, STRANGER) as process:
        assert not belongs(process, held()) and not belongs(process, held(STRANGER))


@needs("user-namespaces")
def test_a_process_in_a_user_namespace_of_the_owner_belongs_to_the_tenant() -> None:
    with running(IN_A_USER_NAMESPACE) as process:
        assert belongs(process, held()) and not belongs(process, held(STRANGER))


def test_a_later_process_with_the_same_pid_does_not_belong_to_the_tenant() -> None:
    with running(AS_USER, TENANT, TENANT) as process:
        assert not belongs(replace(process, start_ticks=process.start_ticks - 1), held())
    assert not belongs(process, held())


def test_a_process_of_any_uid_in_the_containers_cgroup_belongs_to_the_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(AS_USER, STRANGER, STRANGER) as process:
        groups = {"the group": (process.pid,)}
        monkeypatch.setattr(belonging, "processes_in", lambda name: groups.get(name, ()))
        assert belongs(process, held(cgroup="the group")) and not belongs(process, held(cgroup="another"))


@needs("namespaces")
def test_a_process_with_the_lease_mounted_at_its_container_path_belongs_to_the_tenant() -> None:
    with running(WITH_THE_LEASE, CONTAINER_LEASE, "a1") as process:
        assert belongs(process, held()) and belongs(process, held(ANYONE))
    with running(WITH_THE_LEASE, CONTAINER_LEASE, "a11") as process:
        assert not belongs(process, held())


@needs("namespaces")
def test_the_mounts_of_a_process_are_read_up_to_a_bounded_length() -> None:
    """An attack: reading 73 MiB of mounts of a user's process would hold the event loop for 0.9 s."""
    head, mounts_lease, rest = WITH_THE_LEASE.partition("os.makedirs(sys.argv[1])")
    with running(head + AND_MANY_MOUNTS + mounts_lease + rest, CONTAINER_LEASE, "a1") as late:
        assert mounts_at(late.pid, CONTAINER_LEASE) == []
    mounts_lease, up, rest = WITH_THE_LEASE.partition("os.setresuid")
    with running(mounts_lease + AND_MANY_MOUNTS + up + rest, CONTAINER_LEASE, "a1") as early:
        assert mounts_at(early.pid, CONTAINER_LEASE) == ["/vgpud/leases/a1"]


@needs("namespaces")
def test_a_container_process_belongs_to_its_pod_and_a_host_process_to_none() -> None:
    with running(AS_USER, TENANT, TENANT) as process:
        assert not belongs(process, held(ANYONE))
    with running(WITH_THE_LEASE, "/run/elsewhere", "a1") as process:
        assert belongs(process, held(ANYONE)) and not belongs(process, held())


@needs("namespaces", "user-namespaces")
def test_a_process_of_a_user_that_mounts_a_forged_lease_does_not_belong_to_the_tenant() -> None:
    """An attack: if the process counted as part of another user's allocation on the device, it would be
    suspended with it and could make the suspension fail.
    """
    with running(WITH_A_FORGED_LEASE, CONTAINER_LEASE, "a1") as process:
        assert belongs(process, held(STRANGER))
        assert not belongs(process, held()) and not belongs(process, held(ANYONE))


@needs("namespaces", "user-namespaces")
def test_a_process_in_a_sandbox_inside_a_pod_belongs_to_the_pod() -> None:
    with running(SANDBOX_IN_A_CONTAINER) as process:
        assert belongs(process, held(ANYONE)) and not belongs(process, held())
