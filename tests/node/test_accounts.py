"""The user accounts that quota rules by user name and by group need."""

import asyncio
import os
import threading
from pathlib import Path
from threading import Event

from tests import clock
from vgpud import directory
from vgpud.model.caller import BARE, UNKNOWN, Account
from vgpud.model.tenancy import ANYONE, Owner
from vgpud.node.tenants.accounts import Accounts
from vgpud.policy.accounts import unknown_names
from vgpud.policy.load import check
from vgpud.policy.model import Policy, QuotaRule

ALICE = Owner(1000, 100)
KNOWN = Account("alice", frozenset({100, 300}))
BY_GROUP = Policy(quota=(QuotaRule(gids=(300,)),))


class Directory:
    def __init__(self, answer: Account = KNOWN) -> None:
        self.asked: list[int] = []
        self.answer = answer
        self.opened = Event()
        self.opened.set()

    def look_up(self, uid: int) -> Account:
        self.asked.append(uid)
        self.opened.wait(600)
        return self.answer


def test_the_user_root_is_known_by_name_and_with_all_its_groups() -> None:
    account = directory.account_of(0)
    assert account.user == "root"
    assert account.gids >= {0, *os.getgrouplist("root", 0)}


def test_a_uid_without_an_account_counts_as_unknown() -> None:
    assert directory.account_of(3_999_999) == UNKNOWN


def test_a_user_name_in_the_policy_that_the_host_lacks_is_reported_as_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "vgpud.toml"
    path.write_text('version = 1\n[[quota]]\nusers = ["root", "no-such-user"]\nmax_devices = 1\n')
    (problem,) = unknown_names(check(path), directory.has_user, directory.has_group)
    assert str(problem).startswith(f"{path}:3: quota[0].users: this host has no user no-such-user")


def test_a_user_account_is_looked_up_once_a_minute_and_only_for_rules_that_need_it() -> None:
    directory = Directory()

    async def main() -> None:
        accounts = Accounts(directory.look_up)
        assert await accounts.of(ALICE, Policy(quota=(QuotaRule(uids=(1000,)),))) == BARE
        assert await accounts.of(Owner(ANYONE, ANYONE), BY_GROUP) == BARE
        assert directory.asked == []
        for seconds, lookups in ((0, 1), (59, 1), (2, 2)):
            await asyncio.sleep(seconds)
            assert await accounts.of(ALICE, BY_GROUP) == KNOWN
            assert await accounts.of(Owner(1000, 300), BY_GROUP) == KNOWN
            assert len(directory.asked) == lookups

    clock.run(main())


def test_an_unknown_account_is_looked_up_again_after_some_seconds() -> None:
    directory = Directory(UNKNOWN)

    async def main() -> None:
        accounts = Accounts(directory.look_up)
        for _ in range(2):
            assert await accounts.of(ALICE, BY_GROUP) == UNKNOWN
        assert len(directory.asked) == 1
        directory.answer = KNOWN
        await asyncio.sleep(6)
        assert await accounts.of(ALICE, BY_GROUP) == KNOWN

    clock.run(main())


def test_a_directory_service_that_hangs_blocks_neither_the_event_loops_threads_nor_its_end() -> None:
    directory = Directory()
    directory.opened.clear()

    async def main() -> None:
        accounts = Accounts(directory.look_up, patience_seconds=0.01)
        asked = (accounts.of(Owner(uid, 100), BY_GROUP) for uid in range(1, 101))
        assert set(await asyncio.gather(*asked)) == {UNKNOWN}
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 300)
        assert len(directory.asked) == 2

    try:
        asyncio.run(main())
        assert all(one.daemon for one in threading.enumerate() if one.name == "vgpud-account")
    finally:
        directory.opened.set()
