"""`vgpuctl remote grant`, `grants` and `revoke` on a node whose door is not started."""

import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remote.node import CERTIFICATES, USER
from vgpud.remote.grants import CERTIFICATE, FILE

Ctl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ctl(tmp_path: Path) -> Ctl:
    (tmp_path / CERTIFICATE).parent.mkdir()
    (tmp_path / CERTIFICATE).write_bytes((CERTIFICATES / "door.pem").read_bytes())
    told = {"VGPUD_CONFIG": str(tmp_path / "vgpud.toml"), "VGPUD_STATE_DIR": str(tmp_path)}

    def run(*words: str, **more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "vgpud.ctl", "remote", *words]
        return subprocess.run(
            command, env={**os.environ, **told, **more}, capture_output=True, text=True, check=False
        )

    return run


def test_a_grant_is_not_for_an_account_whose_group_may_allocate(ctl: Ctl) -> None:
    account = next(one for one in pwd.getpwall() if one.pw_uid != 0)
    refused = ctl("grant", account.pw_name, VGPUD_GROUP=grp.getgrgid(account.pw_gid).gr_name)
    assert f"may not run as {account.pw_name}, which vgpud's sockets are open to" in refused.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((USER, "--expires", "0s"), "'0s' is less than a second"),
        ((USER, "--sessions", "0"), "'0' is not a number of sessions from 1 to 1024"),
        ((USER, "--certificate", str(CERTIFICATES / "client.key")), "client.key is a private key"),
        (("root",), "the programs of a remote user may not run as root"),
    ],
    ids=["expires", "sessions", "key", "root"],
)
def test_a_grant_that_helps_its_user_to_nothing_or_to_all_is_refused(
    ctl: Ctl, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    refused = ctl("grant", *words)
    assert sentence in refused.stderr
    assert refused.returncode == 2
    assert not (tmp_path / FILE).exists()


def test_a_grant_says_which_bounds_it_lacks(ctl: Ctl) -> None:
    bounds = ("--memory", "1GiB", "--cores", "5", "--sessions", "1")
    assert (
        " has no bound on memory, cores, sessions but the policy's and no expiry\n"
        in ctl("grant", USER).stderr
    )
    assert " has no expiry\n" in ctl("grant", USER, *bounds).stderr
    assert " has no" not in ctl("grant", USER, *bounds, "--expires", "1h").stderr


def test_a_grant_is_revoked_by_the_first_characters_of_its_id(ctl: Ctl, tmp_path: Path) -> None:
    for user in ("bin", USER, "nobody"):
        ctl("grant", user)
    rows = json.loads((tmp_path / FILE).read_text())
    for row, name in zip(rows, ("abcd1111", "abcd2222", "abcd3333"), strict=True):
        row["id"] = name
    (tmp_path / FILE).write_text(json.dumps(rows))
    assert "3 grants begin with 'abcd': abcd1111, abcd2222, abcd3333" in ctl("revoke", "abcd").stderr
    assert "there is no grant 'abc'" in ctl("revoke", "abc").stderr
    assert ctl("revoke", "ABCD2").stderr == f"grant abcd2222 of {USER} is revoked\n"
    assert ctl("revoke", "nobody").stderr == "grant abcd3333 of nobody is revoked\n"
    (left,) = json.loads((tmp_path / FILE).read_text())
    assert left["id"] == "abcd1111"
