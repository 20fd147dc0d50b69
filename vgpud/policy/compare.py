"""Compares two policies, key by key."""

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
    """The differences of two effective policies (effective.py), in the order of the first policy's keys, then
    the second's.
    """
    old = {spell(path): value for path, value in leaves(before)}
    new = {spell(path): value for path, value in leaves(after)}
    keys = [*old, *(key for key in new if key not in old)]
    return tuple(Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))
