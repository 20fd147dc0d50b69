"""Looks up users and groups of the host (nsswitch.conf(5)). Each call can block if a database is on another
host.
"""

import grp
import os
import pwd

from vgpud.model.caller import UNKNOWN, Account


def account_of(uid: int) -> Account:
    """The name of a user, and all groups of its account. UNKNOWN if no database has the account: libc does
    not distinguish an unreachable database from one without the user.
    """
    try:
        entry = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return UNKNOWN
    gids = frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, gids, frozenset(filter(None, map(_group, gids))))


def has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except (KeyError, ValueError):
        return False
    return True


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OverflowError):
        return ""
