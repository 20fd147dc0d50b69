"""Checks of `vgpuctl doctor` that read files of the host."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conditions import needs
from tests.simnode import ROOT
from vgpud.api.gen import vgpud_pb2 as pb
from vgpud.ctl import checks
from vgpud.policy.remote import RemoteSettings
from vgpud.remote.grants import Grants


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("passwd: files sss\n", ""),
        ("subid: files\n", ""),
        ("# subid: sss\nsubid:  sss\n", "takes subordinate uids from sss, and vgpud reads only /etc/subuid"),
    ],
)
def test_doctor_reports_subordinate_uid_ranges_that_vgpud_does_not_know(
    tmp_path: Path, text: str, warned: str
) -> None:
    file = tmp_path / "nsswitch.conf"
    assert list(checks.subordinate_uids(file)) == []
    file.write_text(text)
    found = list(checks.subordinate_uids(file))
    assert [warned in one.sentence for one in found] == ([True] if warned else [])


@needs("root")
def test_doctor_reports_a_cdi_folder_that_a_user_can_change(tmp_path: Path) -> None:
    for name in ("run", "cdi"):
        (tmp_path / name).mkdir(mode=0o755)
    host = checks.Host.of(os.environ)._replace(run_dir=tmp_path / "run", cdi_dir=tmp_path / "cdi")
    assert [one.state for one in checks.specs(host)] == [checks.OK]
    (tmp_path / "cdi").chmod(0o777)
    (found,) = checks.specs(host)
    assert found.state == checks.FAIL
    assert found.sentence.startswith(f"others can write to {tmp_path}/cdi")


def test_doctor_reports_that_the_key_of_the_remote_door_is_missing(tmp_path: Path) -> None:
    (tmp_path / "certificate.pem").touch()
    assert list(checks.remote(RemoteSettings(), tmp_path / "certificate.pem")) == []
    _, certificate, key = checks.remote(RemoteSettings(server="/bin/true"), tmp_path / "certificate.pem")
    assert (certificate.check, certificate.state) == ("remote door", checks.OK)
    assert (key.state, key.sentence) == (checks.FAIL, f"{tmp_path}/key.pem does not exist")


@needs("root")
def test_doctor_says_which_build_of_the_remote_engine_is_there(tmp_path: Path) -> None:
    program = tmp_path / "server"

    def found(text: str, recorded: str = "") -> checks.Finding:
        program.write_text(text)
        program.chmod(0o755)
        settings = RemoteSettings(server=str(program), server_sha256=recorded)
        return next(iter(checks.remote(settings, tmp_path / "certificate.pem")))

    other = found("another program")
    assert other.state == checks.FAIL
    assert other.sentence == f"{program} is no server of lupine, or of an older version"
    assert other.fix == "build github.com/lupinemachines/lupine at 7fbd364, or take its images' server"
    script = found("#!/bin/sh")
    assert script.sentence == other.sentence
    assert "; if this script starts the server, server_sha256 = " in script.fix
    assert script.fix.endswith(" in [remote], which replaces this check")
    new = found("x-lupine-va-base")
    assert new.state == checks.WARN
    assert new.sentence == f"{program} is lupine 36de703 or later, and the policy does not record which build"
    digest = hashlib.sha256(b"x-lupine-va-base").hexdigest()
    assert f'server_sha256 = "{digest}" in [remote]' in new.fix
    same = found("x-lupine-va-base", digest)
    assert (same.state, same.sentence) == (
        checks.OK,
        f"lupine by {program}, the recorded build {digest[:16]}",
    )
    upgraded = found("x-lupine-va-base, upgraded", digest)
    assert upgraded.state == checks.FAIL
    assert upgraded.sentence.endswith(f", and {digest[:16]} is recorded")


def test_a_server_sha256_that_is_no_digest_is_refused_with_a_hint() -> None:
    with pytest.raises(ValidationError, match="a SHA-256 has 64 hexadecimal digits, in small letters"):
        RemoteSettings(server_sha256="F" * 64)


def test_doctor_says_why_the_path_of_the_remote_engine_is_no_usable_program(tmp_path: Path) -> None:
    (tmp_path / "text").touch(mode=0o644)
    for name, what in (("none", "does not exist"), (".", "is a folder"), ("text", "is not a program")):
        settings = RemoteSettings(server=f"{tmp_path}/{name}")
        first = next(iter(checks.remote(settings, tmp_path / "certificate.pem")))
        assert (first.state, first.sentence) == (checks.FAIL, f"{tmp_path}/{name} {what}")


def test_doctor_reports_grants_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "grants.json"
    assert list(checks.grants(Grants(file))) == []
    file.write_text("[")
    (found,) = checks.grants(Grants(file))
    assert found.state == checks.FAIL
    assert found.sentence.startswith(f"the grants in {file} cannot be used: ")


def test_doctor_reports_leases_without_file_systems_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade, leases that are there share the file system of the run folder."""
    host = checks.Host.of(os.environ)._replace(run_dir=tmp_path)
    (tmp_path / "leases" / "old").mkdir(parents=True)
    monkeypatch.setattr(checks, "SYSTEMD", tmp_path)
    (found,) = checks.leases(host, ["old"])
    assert (found.state, found.fix.split(";")[0]) == (checks.WARN, "systemctl restart vgpud.service")
    monkeypatch.setattr(os.path, "ismount", lambda path: path.parent == tmp_path / "tenants")
    (found,) = checks.leases(host, ["old", "quota"])
    assert (found.state, found.sentence) == (
        checks.WARN,
        "1 lease of an earlier version without a file system of its own: old",
    )
    (tmp_path / "leases" / "new").symlink_to("../tenants/0/leases/new")
    (found,) = checks.leases(host, ["new", "quota"])
    assert (found.state, found.sentence) == (checks.OK, f"32 file systems for leases in {tmp_path}/tenants")
    monkeypatch.setattr(checks, "SYSTEMD", tmp_path / "none")
    assert list(checks.leases(host, ["old"])) == []


def test_doctor_knows_how_many_file_systems_the_unit_mounts() -> None:
    text = (ROOT / "systemd" / "vgpud.service").read_text()
    assert f"$$(seq 0 {checks.LEASE_MOUNTS - 1})" in text


_DRAIN = "vgpuctl drain 3"


@pytest.mark.parametrize(
    ("fields", "state", "sentence", "fix"),
    [
        (
            {"health": "lost", "health_reason": "Xid 79"},
            checks.FAIL,
            "it is lost: Xid 79",
            "nvidia-smi --gpu-reset",
        ),
        (
            {"health": "sick", "health_reason": "rows"},
            checks.FAIL,
            "it is sick: rows",
            f"'{_DRAIN} --move', then",
        ),
        (
            {"health": "sick", "health_reason": "rows", "mode": "mps"},
            checks.FAIL,
            "it is sick: rows",
            f"('vgpuctl ls --device 3') cannot be moved: wait for their end, '{_DRAIN}', then",
        ),
        (
            {"health": "ok", "health_reason": "a row waits"},
            checks.WARN,
            "a row waits",
            "reset it when it is idle",
        ),
        (
            {"health": "ok", "mig": pb.Mig(pending=True)},
            checks.WARN,
            "MIG mode becomes on at its next reset",
            f"drain it ('{_DRAIN}'), then nvidia-smi --gpu-reset -i 3",
        ),
        (
            {"health": "ok", "compute_mode": "prohibited"},
            checks.WARN,
            "its compute mode is prohibited, which lets no process use it",
            "nvidia-smi -i 3 -c DEFAULT",
        ),
        ({"health": "ok", "drained": True}, checks.OK, "H200, idle, drained", ""),
    ],
    ids=["lost", "sick", "sick in mps", "row", "mig", "prohibited", "drained"],
)
def test_doctor_says_what_to_do_with_a_device(
    fields: dict[str, Any], state: str, sentence: str, fix: str
) -> None:
    (found,) = checks.devices([pb.Device(index=3, name="H200", **fields)])
    assert (found.state, found.sentence) == (state, sentence)
    assert fix in found.fix


def test_doctor_says_what_the_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    uname, room = os.uname(), os.statvfs(tmp_path)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*uname[:2], "4.18.0-553.el8", *uname[3:])))
    monkeypatch.setattr(os, "pidfd_open", forbidden)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((room[0], 2**20, 9, 9, 63, *room[5:])))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks, "SYSTEMD", tmp_path)
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho failed\n")
    (tmp_path / "systemctl").chmod(0o755)
    host = checks.Host.of(os.environ)._replace(run_dir=tmp_path, state_dir=tmp_path / "none", group="root")
    kernel, pidfd, _ = checks.kernel()
    assert (kernel.state, kernel.sentence) == (checks.FAIL, "Linux 4.18.0-553.el8 has no pidfd")
    assert (pidfd.state, pidfd.sentence) == (checks.FAIL, "pidfd_open fails: operation not permitted")
    assert next(checks.folders(host)).sentence == f"63 MiB are free in {tmp_path}"
    assert next(checks.units())[1:] == (
        checks.FAIL,
        "vgpud.service is failed",
        "systemctl start vgpud.service; journalctl -u vgpud.service",
    )
    *_, group = checks.sockets(host)
    assert (group.state, group.sentence) == (checks.WARN, "you are not in group root, so you can only read")
    *_, group = checks.sockets(host._replace(group="no-such-group"))
    assert (group.state, group.fix.partition(",")[0]) == (checks.FAIL, "groupadd --system no-such-group")
    (driver, _) = checks.driver(pb.NodeReply(hardware_error="no NVML", vgpud_version="0"))
    assert (driver.state, driver.sentence) == (checks.FAIL, "no NVML")
