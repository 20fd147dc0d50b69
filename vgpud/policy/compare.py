"""Compares two policies, key by key."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vgpud.policy.effective import leaves
from vgpud.policy.locate import spell


class Change(NamedTuple):
    """A changed key. `before` or `after` is None if only one of the policies has it."""

    key: str
    before: object | None
    after: object | None


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """The differences of two effective policies (effective.py), table by table, in the order of the first
    policy's keys, then the second's.
    """
    old = {spell(path): value for path, value in leaves(before)}
    new = {spell(path): value for path, value in leaves(after)}
    keys = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    tables = list(dict.fromkeys(map(_table, keys)))
    keys.sort(key=lambda key: tables.index(_table(key)))
    return tuple(Change(key, old.get(key), new.get(key)) for key in keys)


def _table(key: str) -> str:
    """The top-level table of a key: "device" for "device[1].mode"."""
    return re.split(r"[.\[]", key, maxsplit=1)[0]
