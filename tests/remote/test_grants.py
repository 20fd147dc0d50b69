"""`vgpuctl remote grant`, `grants` and `revoke` on a node whose door is not started."""

import grp
import json
import os
import pwd
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import prepared
from tests.conditions import needs
from tests.remote.node import CERTIFICATES, USER
from tests.remote.test_parts import ALICE
from vgpud.model.errors import VgpuError
from vgpud.remote.certificates import _not_after, der_of, fingerprint_of
from vgpud.remote.grants import CERTIFICATE, FILE, Grants

ONE, OTHER = USER, "nobody"
OF_ONE, OF_OTHER = (pwd.getpwnam(name).pw_uid for name in (ONE, OTHER))
FREE = next(uid for uid in range(64000, 65000) if uid not in {one.pw_uid for one in pwd.getpwall()})
_WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()

_PEM = b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----\n"

Ctl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ctl(tmp_path: Path) -> Ctl:
    (tmp_path / CERTIFICATE).parent.mkdir()
    (tmp_path / CERTIFICATE).write_bytes((CERTIFICATES / "door.pem").read_bytes())
    told = {"VGPUD_CONFIG": str(tmp_path / "vgpud.toml"), "VGPUD_STATE_DIR": str(tmp_path)}

    def run(*words: str, before: tuple[str, ...] = (), **more: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **told, **more}
        if not before:
            process = prepared.ctl(["remote", *words], environment)
            said, errors = process.communicate(timeout=300)
            return subprocess.CompletedProcess(words, process.wait(), said, errors)
        command = [*before, sys.executable, "-m", "vgpud.ctl", "remote", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_grant_for_an_account_whose_group_may_open_the_sockets_is_refused(ctl: Ctl) -> None:
    account = next(one for one in pwd.getpwall() if one.pw_uid != 0)
    refused = ctl("grant", account.pw_name, VGPUD_GROUP=grp.getgrgid(account.pw_gid).gr_name)
    assert f"may not run as {account.pw_name}, who may open vgpud's sockets" in refused.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((ONE, "--expires", "0s"), "'0s' is less than a second"),
        ((ONE, "--sessions", "0"), "'0' is not a number of sessions from 1 to 1024"),
        ((ONE, "--certificate", str(CERTIFICATES / "client.key")), "client.key is a private key"),
        (("root",), "the programs of a remote user may not run as root"),
    ],
    ids=["expires", "sessions", "key", "root"],
)
def test_a_grant_that_is_useless_or_unsafe_is_refused(
    ctl: Ctl, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    refused = ctl("grant", *words)
    assert sentence in refused.stderr
    assert refused.returncode == 2
    assert not (tmp_path / FILE).exists()


def test_vgpuctl_grant_warns_of_the_bounds_that_a_grant_lacks(ctl: Ctl) -> None:
    bounds = ("--memory", "1GiB", "--cores", "5", "--sessions", "1")
    all_open = " has no expiry and no bounds of its own on memory, cores, sessions\n"
    assert all_open in ctl("grant", ONE).stderr
    assert " has no expiry\n" in ctl("grant", ONE, *bounds).stderr
    assert " has no" not in ctl("grant", ONE, *bounds, "--expires", "1h").stderr


@needs("root")  # an ordinary user's folder is no place for a policy
def test_vgpuctl_grant_warns_if_the_policy_names_no_remote_server(ctl: Ctl, tmp_path: Path) -> None:
    warning = "this node makes no remote slices until server of [remote] is set\n"
    (tmp_path / "vgpud.toml").write_text("version = 1\n")
    assert warning in ctl("grant", ONE).stderr
    (tmp_path / "vgpud.toml").write_text('version = 1\n[remote]\nserver = "/opt/server"\n')
    assert warning not in ctl("grant", ONE).stderr


def test_a_client_warns_if_other_users_may_read_its_token_file(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("not a token")
    for mode, warned in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        said = ctl("status", "localhost", "--token-file", str(file)).stderr
        assert (f"others may read the token in {file}: chmod 600 {file}\n" in said) is warned
        assert "is not a token" in said


def test_a_grant_is_revoked_by_the_first_characters_of_its_id(ctl: Ctl, tmp_path: Path) -> None:
    _grants(ctl, tmp_path, {"abcd1111": ONE, "abcd2222": OTHER, "abcd3333": OTHER})
    assert "3 grants begin with 'abcd': abcd1111, abcd2222, abcd3333" in ctl("revoke", "abcd").stderr
    short = ctl("revoke", "abc").stderr
    assert "there is no grant 'abc'" in short
    assert "hint: give at least 4 characters of the id" in short
    assert ctl("revoke", "ABCD2").stderr == f"grant abcd2222 of {OTHER} is revoked\n"
    assert _left(tmp_path) == ["abcd1111", "abcd3333"]


def test_a_user_given_by_name_and_one_given_by_number_are_the_same_account(ctl: Ctl, tmp_path: Path) -> None:
    for user in (ONE, str(OF_ONE), f"0{OF_ONE}", OTHER):
        assert f" of {ONE if user != OTHER else OTHER}; its token" in ctl("grant", user).stderr
    ctl("revoke", f"0{OF_ONE}")
    assert [one["user"] for one in json.loads((tmp_path / FILE).read_text())] == [OTHER]


def test_a_number_that_is_both_a_uid_with_grants_and_the_start_of_a_grant_id_revokes_nothing(
    ctl: Ctl, tmp_path: Path
) -> None:
    _grants(ctl, tmp_path, {f"{OF_OTHER}000": ONE, "abcd2222": OTHER})
    refused = ctl("revoke", str(OF_OTHER))
    assert f"is the uid of a user with grants, and begins the id of grant {OF_OTHER}000" in refused.stderr
    assert _left(tmp_path) == [f"{OF_OTHER}000", "abcd2222"]


@pytest.mark.parametrize("user", [str(FREE), "no-such-account", "4294967294"])
def test_a_grant_for_a_user_without_an_account_on_the_node_is_refused(
    ctl: Ctl, tmp_path: Path, user: str
) -> None:
    refused = ctl("grant", user)
    assert f"this host has no user '{user}' (E103)" in refused.stderr
    assert refused.returncode == 2
    assert not (tmp_path / FILE).exists()


def test_a_client_certificate_has_at_most_one_valid_grant(ctl: Ctl, tmp_path: Path) -> None:
    client = ("--certificate", str(CERTIFICATES / "client.pem"))
    ctl("grant", ONE, *client)
    (held,) = _left(tmp_path)
    refused = ctl("grant", OTHER, *client)
    assert f"grant {held} of {ONE} has this certificate (E103)" in refused.stderr
    assert _left(tmp_path) == [held]
    shown = json.loads(ctl("grants", "-o", "json").stdout)["grants"]
    assert shown[0]["certificateSha256"] == fingerprint_of(CERTIFICATES / "client.pem")
    assert f" certificate {shown[0]['certificateSha256'][:16]} " in ctl("grants").stdout
    rows = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps([{**rows[0], "expires": 1}]))
    assert ctl("grant", OTHER, *client).returncode == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("door.pem", "is the certificate of the door of this node"),
        ("authority.pem", "is the certificate of an authority"),
        ("expired.pem", "expired at 2020-01-02T03:04:05Z"),
    ],
)
def test_a_certificate_that_is_not_for_clients_is_refused(
    ctl: Ctl, tmp_path: Path, name: str, sentence: str
) -> None:
    refused = ctl("grant", ONE, "--certificate", str(CERTIFICATES / name))
    assert f"{name} {sentence} (E103)" in refused.stderr
    assert refused.returncode == 2
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("expired.pem", "20200102030405Z"),
        ("client.pem", "21261101210009Z"),
        ("door.pem", "21261101210009Z"),
    ],
    ids=["two digits", "four digits", "version 3"],
)
def test_the_expiry_time_of_a_certificate_is_read(name: str, end: str) -> None:
    assert _not_after(der_of(CERTIFICATES / name)) == end


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read FILE: no such file or directory"),
        (b"", "FILE has no certificate"),
        (ssl.PEM_cert_to_DER_cert((CERTIFICATES / "client.pem").read_text()), "FILE is not a text file"),
        (_PEM % b"AAAA", "the certificate in FILE is damaged"),
        (_PEM % b"!", "the certificate in FILE is damaged"),
    ],
    ids=["missing", "empty", "DER", "not DER", "not base64"],
)
def test_a_file_without_a_certificate_is_named(
    ctl: Ctl, tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "client.pem"
    if content is not None:
        file.write_bytes(content)
    refused = ctl("grant", ONE, "--certificate", str(file))
    assert f"vgpuctl: {sentence.replace('FILE', str(file))} (E103)" in refused.stderr


@pytest.mark.parametrize(
    ("in_the_way", "said"),
    [("grants.lock", "is a directory"), ("grants.new", "is a directory"), (None, "there are 0 grants")],
)
def test_a_grant_that_cannot_be_stored_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_the_way: str | None, said: str
) -> None:
    if in_the_way is None:
        monkeypatch.setattr("vgpud.remote.grants.MAX_GRANTS", 0)
    else:
        (tmp_path / in_the_way).mkdir()
    grants = Grants(tmp_path / "grants.json")
    with pytest.raises(VgpuError, match=said):
        grants.add(ALICE, "")
    assert grants.all() == ()


def test_a_revocation_on_a_full_disk_keeps_the_grants_and_does_not_advise_to_remove_them(
    tmp_path: Path,
) -> None:
    grants = Grants(tmp_path / "grants.json")
    grant, _ = grants.add(ALICE, "")
    (tmp_path / "grants.new").symlink_to("/dev/full")
    with pytest.raises(VgpuError, match="no space left on device") as refused:
        grants.revoke(grant.id)
    assert refused.value.hint == "free space there; the grants are as they were"
    assert grants.all() == (grant,)


@pytest.mark.parametrize("words", [("grant", ONE), ("grants",), ("revoke", ONE)], ids=lambda words: words[0])
def test_grant_commands_without_root_name_the_missing_permission(
    ctl: Ctl, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "remote").chmod(0)
    refused = ctl(*words, before=_WITHOUT_RIGHTS)
    (tmp_path / "remote").chmod(0o700)
    assert "permission denied (E201)\nhint: call as root\n" in refused.stderr
    assert refused.returncode == 4


def _grants(ctl: Ctl, folder: Path, users: dict[str, str]) -> None:
    """Makes grants with these ids and users."""
    for user in users.values():
        ctl("grant", user)
    rows = json.loads((folder / FILE).read_text())
    for row, name in zip(rows, users, strict=True):
        row["id"] = name
    (folder / FILE).write_text(json.dumps(rows))


def _left(folder: Path) -> list[str]:
    return [one["id"] for one in json.loads((folder / FILE).read_text())]
