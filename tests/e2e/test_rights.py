"""Permissions by the uid and gid that the kernel reports for a caller. Calls of other users come from
processes of these users.
"""

import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prepared
from tests.conditions import needs
from tests.demo.node import ROOT, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import ADMIN, PROBE, TENANT, allocate, eventually, quota, release, states
from tests.otheruser import as_user

pytestmark = needs("root")

GROUP = grp.getgrnam("games")
ALICE = pwd.getpwnam("nobody").pw_uid
BOB = pwd.getpwnam("daemon").pw_uid
RUN = ("-m", "vgpud.ctl", "run")
ASK = ("alloc", "--isolation", "quota", "--memory", "1GiB", "--device", "0")


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node()
    node.environment["VGPUD_GROUP"] = GROUP.gr_name
    # VGPUD_SOCKET would override vgpuctl's own choice of a socket; a test may set it
    del node.environment["VGPUD_SOCKET"]
    _open_up(Path(node.environment["VGPU_SIM_STATE"]))
    node.start()
    return node


def _open_up(state: Path) -> None:
    """Lets every user use the simulated driver, as every user may open the device nodes of a real driver."""
    state.chmod(0o666)
    for parent in state.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(0o755)


def call(
    node: DemoNode, uid: int, *words: str, member: bool = False, socket: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs `vgpuctl WORDS` as this user. `member` puts the process into the group of the tenants' socket."""
    extra = {"VGPUD_SOCKET": str(node.run_dir / socket)} if socket else {}
    user = (uid, pwd.getpwuid(uid).pw_gid, [GROUP.gr_gid] if member else [])
    command = prepared.ctl(words, node.environment | extra, user=user)
    said, errors = command.communicate(timeout=300)
    return subprocess.CompletedProcess(words, command.wait(), said, errors)


def run_as(node: DemoNode, uid: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments as a member of the group."""
    return subprocess.run(
        [*as_user(uid, pwd.getpwuid(uid).pw_gid, [GROUP.gr_gid]), sys.executable, *words],
        env=node.environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )


def test_each_user_may_list_allocations_and_devices_but_sees_no_container_edits(node: DemoNode) -> None:
    held = quota(node)
    for words in (("status",), ("plan", "--memory", "1GiB")):
        done = call(node, ALICE, *words)
        assert done.returncode == 0, done.stderr
    shown = call(node, ALICE, "show", held.id, "-o", "json").stdout
    assert held.id in shown
    assert "LD_PRELOAD" not in shown
    release(node, held.id)


@pytest.mark.parametrize("socket", ["", TENANT, ADMIN])
def test_a_user_outside_the_group_cannot_allocate(node: DemoNode, socket: str) -> None:
    refused = call(node, ALICE, *ASK, socket=socket)
    assert refused.returncode == 4, refused.stderr
    assert "E201" in refused.stderr
    assert states(node) == {}


# Prints the error of each change of the allocation sys.argv[1].
CHANGES = """
import sys
from vgpud.api.client import Client
from vgpud.model.errors import VgpuError
changes = {
    "release": [True], "resize": [2 << 30], "suspend": [True], "resume": [], "move": [[]], "pause": [],
    "unpause": [],
}
with Client() as calls:
    for name, more in changes.items():
        try:
            getattr(calls, name)(sys.argv[1], *more)
        except VgpuError as error:
            print(name, error.code.name, error.sentence)
"""


def test_a_member_of_the_group_controls_only_its_own_allocations(node: DemoNode) -> None:
    held = call(node, ALICE, *ASK, member=True)
    assert held.returncode == 0, held.stderr
    allocation = held.stdout.strip()
    refused = call(node, BOB, "release", "--force", allocation, member=True)
    assert refused.returncode == 4, refused.stderr
    assert "E202" in refused.stderr
    tried = run_as(node, BOB, "-c", CHANGES, allocation)
    told = [line.split(" ", 2) for line in tried.stdout.splitlines()]
    verbs = ["release", "resize", "suspend", "resume", "move", "pause", "unpause"]
    assert [(verb, code) for verb, code, _ in told] == [(verb, "NOT_OWNER") for verb in verbs], tried
    assert all(str(ALICE) in sentence for _, _, sentence in told)
    assert states(node) == {allocation: "active"}
    done = call(node, ALICE, "release", allocation, member=True)
    assert done.returncode == 0, done.stderr


def test_a_member_of_the_group_cannot_administer(node: DemoNode) -> None:
    for words in (("policy", "reload"), (*ASK, "--owner", f"{BOB}:{BOB}")):
        refused = call(node, ALICE, *words, member=True)
        assert refused.returncode == 4, refused.stderr
        assert "E201" in refused.stderr
    refused = call(node, ALICE, "ls", member=True, socket=ADMIN)
    assert refused.returncode == 4, refused.stderr
    assert states(node) == {}


def test_a_member_of_the_group_gets_priority_only_if_the_policy_allows_it(node: DemoNode) -> None:
    """Above-normal priority needs a quota rule that allows it, because an idle tenant with priority stays on
    a device that others want and is not charged for it.
    """
    ask = (*ASK, "--cores", "10", "--priority", "above-normal")
    config = Path(node.environment["VGPUD_CONFIG"])
    before = config.read_text()
    refused = call(node, ALICE, *ask, member=True)
    assert refused.returncode == 34, refused.stderr
    assert f"uid {ALICE} may not have priority above-normal" in refused.stderr
    assert "E203" in refused.stderr
    assert 'max_priority = "above-normal"' in refused.stderr
    try:
        config.write_text(f'{before}\n[[quota]]\nusers = ["nobody"]\nmax_priority = "above-normal"\n')
        node.ctl("policy", "reload")
        held = call(node, ALICE, *ask, member=True)
        assert held.returncode == 0, held.stderr
        assert call(node, BOB, *ask, member=True).returncode == 34
        release(node, held.stdout.strip())
    finally:
        config.write_text(before)
        node.ctl("policy", "reload")


def test_a_reload_refuses_a_policy_that_a_user_can_change(node: DemoNode) -> None:
    config = Path(node.environment["VGPUD_CONFIG"])
    before = config.stat()
    for uid, mode, told in ((ALICE, 0o644, f"uid {ALICE} owns {config}"), (0, 0o666, "others can write to")):
        os.chown(config, uid, -1)
        config.chmod(mode)
        refused = node.ctl("policy", "reload", check=False)
        assert refused.returncode == 78
        assert told in refused.stderr
        doctor = node.ctl("doctor", check=False)
        assert f"{config}: {told}" in " ".join(doctor.stdout.split())
        checked = node.ctl("policy", "check", str(config), check=False)
        assert checked.returncode == 78
        assert told in checked.stderr
        if mode == 0o666:
            continue  # the same reason reaches the other readers of a policy
        draft = Path(shutil.copy(config, node.folder / "draft.toml"))
        os.chown(draft, uid, -1)
        for verb in (["check", str(draft)], ["diff", str(draft)]):
            assert "warning: vgpud would refuse it here: " in node.ctl("policy", *verb).stderr
        check = prepared.ended_daemon(node.environment, "--check")
        assert check.returncode == 78
        assert told in check.stderr
    os.chown(config, before.st_uid, before.st_gid)
    config.chmod(before.st_mode & 0o7777)
    node.ctl("policy", "reload")


def test_two_members_may_use_the_same_request_id(node: DemoNode) -> None:
    held = call(node, ALICE, *ASK, "--request-id", "shared", member=True)
    assert held.returncode == 0, held.stderr
    other = call(node, BOB, *ASK, "--request-id", "shared", member=True)
    assert other.returncode == 0, other.stderr
    again = call(node, ALICE, *ASK, "--request-id", "shared", member=True)
    assert again.stdout == held.stdout != other.stdout
    for done in (held, other):
        release(node, done.stdout.strip())


def test_root_allocates_for_another_owner(node: DemoNode) -> None:
    held = allocate(node, isolation="quota", memory_bytes=1 << 30, owner_uid=BOB, owner_gid=BOB)
    assert call(node, ALICE, "release", held.id, member=True).returncode == 4
    assert call(node, BOB, "release", held.id, member=True).returncode == 0


def test_a_member_of_the_group_runs_a_program_under_its_limit(node: DemoNode) -> None:
    done = run_as(node, ALICE, *RUN, *ASK[1:], "--", PROBE, "fill", "--piece", "32MiB")
    assert done.returncode == 0, done.stderr
    filled = json.loads(done.stdout.splitlines()[0])
    assert filled["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < int(filled["total_bytes"]) <= 1 << 30
    eventually(lambda: states(node) == {}, "its allocation goes with it")


def test_tenants_reach_their_leases_under_a_daemon_with_umask_0077(make_node: NodeMaker) -> None:
    """systemd starts vgpud with umask 0077."""
    node = make_node()
    node.environment["VGPUD_GROUP"] = GROUP.gr_name
    del node.environment["VGPUD_SOCKET"]
    _open_up(Path(node.environment["VGPU_SIM_STATE"]))
    before = os.umask(0o077)
    try:
        node.start()
    finally:
        os.umask(before)
    for isolation in ("quota", "compute"):
        asked = ("--isolation", isolation, "--memory", "1GiB", "--device", "0")
        ran = run_as(node, ALICE, *RUN, *asked, "--", PROBE, "info")
        assert ran.returncode == 0, (isolation, ran.stdout, ran.stderr)
    assert node.stop() == 0


def test_the_group_can_connect_to_runtime_sock_only_while_the_policy_says_so(make_node: NodeMaker) -> None:
    node = make_node()
    node.environment["VGPUD_GROUP"] = GROUP.gr_name
    config = Path(node.environment["VGPUD_CONFIG"])
    closed = config.read_text()
    opened = f"{closed}\n[runtime]\nusers = true\n"
    door = node.run_dir / "runtime.sock"
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    words = [*as_user(ALICE, ALICE, [GROUP.gr_gid]), sys.executable, "-c", code, str(door)]

    def becomes(mode: int) -> None:
        eventually(lambda: door.exists() and stat.S_IMODE(door.stat().st_mode) == mode, f"mode {mode:o}")
        assert door.stat().st_gid == GROUP.gr_gid
        tried = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (tried.returncode == 0) == (mode == 0o660), tried.stderr
        assert ("Permission denied" in tried.stderr) == (mode == 0o600)

    node.start()
    becomes(0o600)
    for text, mode in ((opened, 0o660), (closed, 0o600), (opened, 0o660)):
        config.write_text(text)
        node.ctl("policy", "reload")
        becomes(mode)
    node.stop()
    node.start()
    becomes(0o660)
