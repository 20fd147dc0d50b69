"""Accounts of users, which quotas by name and group need."""

import asyncio
import os
from pathlib import Path
from threading import Event

from tests import clock
from vgpud.model.caller import BARE, Account
from vgpud.model.tenancy import Owner
from vgpud.node.tenants.accounts import Accounts
from vgpud.policy.accounts import account_of, strangers
from vgpud.policy.load import check
from vgpud.policy.model import Policy, QuotaRule

ALICE = Owner(1000, 100)
KNOWN = Account("alice", frozenset({100, 300}))
BY_GROUP = Policy(quota=(QuotaRule(gids=(300,)),))


class Directory:
    def __init__(self) -> None:
        self.asked = 0
        self.opened = Event()
        self.opened.set()

    def look_up(self, owner: Owner) -> Account:
        self.asked += 1
        self.opened.wait(60)
        return KNOWN


def test_root_is_known_by_name_and_with_all_its_groups() -> None:
    account = account_of(Owner(0, 0))
    assert account.user == "root"
    assert account.gids >= {0, *os.getgrouplist("root", 0)}


def test_a_uid_without_an_account_has_the_group_that_it_runs_with() -> None:
    account = account_of(Owner(3_999_999, 3_999_998))
    assert (account.user, account.gids) == ("", frozenset({3_999_998}))


def test_a_name_that_the_host_lacks_is_a_mistake_of_the_policy(tmp_path: Path) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_text('version = 1\n[[quota]]\nusers = ["root", "nobody-has-this-name"]\nmax_devices = 1\n')
    (problem,) = strangers(check(path))
    assert str(problem).startswith(f"{path}:3: quota[0].users: this host has no user nobody-has-this-name")


def test_an_account_is_looked_up_once_a_minute_and_only_for_rules_that_need_it() -> None:
    directory = Directory()

    async def main() -> None:
        accounts = Accounts(directory.look_up)
        assert await accounts.of(ALICE, Policy(quota=(QuotaRule(uids=(1000,)),))) == BARE
        assert directory.asked == 0
        assert [await accounts.of(ALICE, BY_GROUP) for _ in range(3)] == [KNOWN] * 3
        assert directory.asked == 1

    clock.run(main())


def test_a_directory_that_gives_no_answer_holds_a_request_for_seconds() -> None:
    directory = Directory()
    directory.opened.clear()

    async def main() -> None:
        accounts = Accounts(directory.look_up, patience_seconds=0.01)
        assert await accounts.of(ALICE, BY_GROUP) == BARE
        assert await accounts.of(ALICE, BY_GROUP) == BARE
        assert directory.asked == 1, "one question at a time"
        directory.opened.set()

    asyncio.run(main())
