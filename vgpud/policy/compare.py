"""What differs between two policies, key by key."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vgpud.policy.effective import leaves
from vgpud.policy.locate import spell


class Change(NamedTuple):
    """`before` or `after` is None where the key is in one of the two only."""

    key: str
    before: object | None
    after: object | None


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """Of two effective policies (effective.py), in the order of the keys of the first, then the second."""
    old = {spell(path): value for path, value in leaves(before)}
    new = {spell(path): value for path, value in leaves(after)}
    keys = [*old, *(key for key in new if key not in old)]
    return tuple(Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key))
