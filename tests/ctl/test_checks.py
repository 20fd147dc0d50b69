"""Checks of doctor that look at files of the host."""

import os
from pathlib import Path

import pytest

from tests.conditions import needs
from vgpud.ctl import checks
from vgpud.policy.remote import RemoteSettings


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


def test_doctor_reports_a_missing_key_of_the_door(tmp_path: Path) -> None:
    (tmp_path / "certificate.pem").touch()
    assert list(checks.remote(RemoteSettings(), tmp_path / "certificate.pem")) == []
    _, certificate, key = checks.remote(RemoteSettings(server="/bin/true"), tmp_path / "certificate.pem")
    assert (certificate.check, certificate.state) == ("remote door", checks.OK)
    assert (key.state, key.sentence) == (checks.FAIL, f"{tmp_path}/key.pem does not exist")
