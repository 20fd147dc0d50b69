"""Users and groups of the host by name, for quotas. Reads the host's account databases (nsswitch.conf(5))."""

import grp
import os
import pwd
from collections.abc import Iterator

from vgpud.model.caller import Account
from vgpud.model.tenancy import Owner
from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import Policy
from vgpud.policy.origin import BUILT_IN, Problem


def account_of(owner: Owner) -> Account:
    """The names of the user, and all groups of its account. Can block, where the databases are remote."""
    try:
        entry = pwd.getpwuid(owner.uid)
    except (KeyError, OverflowError):
        return Account(gids=frozenset((owner.gid,)), groups=_names({owner.gid}))
    gids = {owner.gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)}
    return Account(entry.pw_name, frozenset(gids), _names(gids))


def needs_accounts(policy: Policy) -> bool:
    """Does a quota go by more than the user's number?"""
    return any(rule.users or rule.groups or rule.gids for rule in policy.quota)


def strangers(loaded: LoadedPolicy) -> Iterator[Problem]:
    """Users and groups of quotas that the host does not have."""
    for number, rule in enumerate(loaded.policy.quota):
        for key, names, has in (("users", rule.users, _has_user), ("groups", rule.groups, _has_group)):
            missing = [name for name in names if not has(name)]
            if missing:
                path = f"quota[{number}].{key}"
                origin = loaded.origins.get(path, BUILT_IN)
                sentence = f"this host has no {key.removesuffix('s')} {', '.join(missing)}"
                yield Problem(origin, path, sentence, f"see 'getent {_DATABASES[key]}'")


_DATABASES = {"users": "passwd", "groups": "group"}


def _names(gids: set[int]) -> frozenset[str]:
    found = set()
    for gid in gids:
        try:
            found.add(grp.getgrgid(gid).gr_name)
        except (KeyError, OverflowError):
            continue
    return frozenset(found)


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except (KeyError, ValueError):
        return False
    return True
