"""Set-user-id programs of tenants belong to the user that runs them, and to no other user."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conditions import needs
from tests.node.test_belonging import AS_USER, STRANGER, TENANT, held, running
from vgpud.model.tenancy import Allocation, Owner
from vgpud.node.tenants import ancestry
from vgpud.node.tenants.ancestry import belongings, owner_of
from vgpud.node.tenants.belonging import belongs
from vgpud.node.tenants.users import SubordinateUids
from vgpud.serve.peers import passed_process

FIRST = 1_000_000

pytestmark = needs("root")


def allocation(owner: int, counts_for: int) -> Allocation:
    made = held(owner)
    return replace(made, request=replace(made.request, quota_owner=Owner(counts_for, counts_for)))


@pytest.fixture(autouse=True)
def ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "subuid"
    file.write_text(f"{TENANT}:{FIRST}:10\n0:{FIRST + 10}:10\n")
    monkeypatch.setattr(ancestry, "SUBORDINATE", SubordinateUids(file))
    monkeypatch.setenv("VGPU_ALLOCATION", "a1")


def test_a_set_user_id_program_of_another_user_belongs_to_the_user_that_runs_it() -> None:
    """The program has the effective uid of another user, and its environment names that user's allocation."""
    with running(AS_USER, TENANT, STRANGER) as process:
        others, own = held(STRANGER), held(TENANT)
        assert owner_of(process.pid, belongings((others,), {})) == "" and not belongs(process, others)
        assert owner_of(process.pid, belongings((own,), {})) == "a1"
        pidfd = os.pidfd_open(process.pid)
        passed = passed_process(pidfd)
        os.close(pidfd)
        assert passed is not None and passed.user == TENANT


@pytest.mark.parametrize(
    ("uid", "owner", "counts_for", "name"),
    [
        (FIRST, TENANT, TENANT, "a1"),
        (TENANT, FIRST, TENANT, "a1"),
        (FIRST + 1, FIRST, TENANT, "a1"),
        (FIRST, STRANGER, STRANGER, ""),
        (STRANGER, FIRST, TENANT, ""),
        (FIRST + 10, 0, 0, ""),  # root's subordinate uids belong to many containers
    ],
)
def test_a_program_under_a_subordinate_uid_of_the_owner_belongs_to_its_allocation(
    uid: int, owner: int, counts_for: int, name: str
) -> None:
    """A set-user-id program gives its user a subordinate uid on the host. The device memory of such a process
    counts to the user's allocation.
    """
    with running(AS_USER, uid, uid) as process:
        assert owner_of(process.pid, belongings((allocation(owner, counts_for),), {})) == name
