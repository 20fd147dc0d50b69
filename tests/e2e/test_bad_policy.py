"""Wrong policy files: the daemon does not start, or keeps its whole old policy at a reload."""

import json
import signal
from pathlib import Path

import pytest

from tests import prepared
from tests.demo.node import POLICY, DemoNode
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import client, eventually, quota, release, states

SYNTAX = 'version = 1\n[[device]]\nmode = "auto\n'
UNKNOWN_KEY = 'version = 1\n[[device]]\nmode = "auto"\nmatch.nmae = "*"\n'
NEVER_APPLIES = 'version = 1\n[[device]]\nmode = "auto"\n[[device]]\nmode = "mps"\nmatch.index = 1\n'
OTHER_MODE = 'version = 1\n[[device]]\nmode = "exclusive"\n[device.preload]\noversubscribe = 2.0\n'
BAD = {
    "syntax": (SYNTAX, 3, ""),
    "unknown key": (UNKNOWN_KEY, 4, "did you mean"),
    "hidden rule": (NEVER_APPLIES, 4, "can never apply"),
    "settings of another mode": (OTHER_MODE, 4, "settings of mode preload"),
    "empty": ("", 1, "version"),
    "binary": ("version = 1\n\0\x01", 2, ""),
}


def config(node: DemoNode) -> Path:
    return Path(node.environment["VGPUD_CONFIG"])


@pytest.fixture(scope="module")
def node(make_shared_node: NodeMaker) -> DemoNode:
    node = make_shared_node()
    node.start()
    return node


@pytest.mark.parametrize("kind", ["syntax", "hidden rule", "empty", "binary"])
def test_vgpud_refuses_to_start_with_a_bad_policy(make_node: NodeMaker, kind: str) -> None:
    text, line, said = BAD[kind]
    node = make_node(policy=text)
    done = prepared.ended_daemon(node.environment)
    assert done.returncode == 78
    assert "E104" in done.stderr
    assert f"{config(node)}:{line}" in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (node.folder / "state").exists(), "what cannot start touches nothing"


@pytest.mark.parametrize("kind", ["unknown key", "binary"])
def test_a_reload_of_a_bad_policy_keeps_the_old_one(node: DemoNode, kind: str) -> None:
    text, line, said = BAD[kind]
    with client(node) as calls:
        before = calls.get_policy()
    config(node).write_text(text)
    refused = node.ctl("policy", "reload", check=False)
    config(node).write_text(POLICY)
    assert refused.returncode == 78
    assert f"{config(node)}:{line}" in refused.stderr
    assert said in refused.stderr
    with client(node) as calls:
        assert calls.get_policy() == before
        assert not calls.reload_policy().changed
    release(node, quota(node).id)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("match.index = 12", "the node has no device 12"),
        ('mode = "mig"\nmig.layout = ["1g.10gb*7"]', "mig.layout: device 0"),
    ],
)
def test_reload_policy_check_and_doctor_refuse_a_rule_that_the_devices_do_not_support(
    node: DemoNode, rule: str, said: str
) -> None:
    config(node).write_text(f"version = 1\n[[device]]\n{rule}\n")
    answers = [
        node.ctl(*words, check=False)
        for words in (
            ("policy", "reload"),
            ("policy", "reload", "--dry-run"),
            ("policy", "check", str(config(node))),
            ("doctor",),
        )
    ]
    config(node).write_text(POLICY)
    assert [answer.returncode for answer in answers] == [78, 78, 78, 37]
    assert all(said in answer.stdout + answer.stderr for answer in answers)


def test_sighup_reloads_and_survives_a_bad_policy(node: DemoNode) -> None:
    assert node.daemon is not None
    with client(node) as calls:
        before = calls.get_policy().digest
        config(node).write_text(UNKNOWN_KEY)
        node.daemon.send_signal(signal.SIGHUP)
        eventually(lambda: "did you mean" in node.log.read_text(), "the mistake is in the log")
        assert calls.get_policy().digest == before
        config(node).write_text('version = 1\n[[device]]\nmode = "mps"\n')
        node.daemon.send_signal(signal.SIGHUP)
        eventually(lambda: calls.get_policy().digest != before, "a right one is taken")
        config(node).write_text(POLICY)
        node.daemon.send_signal(signal.SIGHUP)
        eventually(lambda: calls.get_policy().digest == before, "and the old one again")


def test_a_reload_changes_the_mode_of_a_device_in_use_after_its_tenants_leave(node: DemoNode) -> None:
    held = quota(node, 2)
    config(node).write_text('version = 1\n[[device]]\nmode = "mps"\n')
    tried = node.ctl("policy", "reload", "--dry-run", check=False)
    assert tried.returncode == 1
    assert "waiting: device 0" in tried.stdout
    reloaded = json.loads(node.ctl("policy", "reload", "-o", "json").stdout)
    assert [s for s in reloaded["waiting"] if "device 0" in s and "preload" in s], reloaded
    assert len(reloaded["waiting"]) == 1, reloaded
    assert reloaded["done"] == ["devices 1, 2, 3, 4, 5, 6, 7: mode auto becomes mps"], reloaded
    assert states(node) == {held.id: "active"}
    refused = node.ctl("alloc", "--isolation", "quota", "--memory", "1GiB", check=False)
    assert refused.returncode == 34, refused.stderr
    assert "E203" in refused.stderr
    release(node, held.id)
    drained = node.ctl_json("alloc", "--isolation", "compute", "--memory", "1GiB", "--device", "0")
    release(node, drained["id"])
    config(node).write_text(POLICY)
    node.ctl("policy", "reload")


def test_a_reload_of_an_unreadable_policy_is_refused(node: DemoNode) -> None:
    hidden = config(node).with_name("gone")
    config(node).rename(hidden)
    config(node).mkdir()
    try:
        refused = node.ctl("policy", "reload", check=False)
        assert refused.returncode == 78
        assert str(config(node)) in refused.stderr
    finally:
        config(node).rmdir()
        hidden.rename(config(node))
