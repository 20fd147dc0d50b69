"""Checks [[device]] rules and [[quota]] tables together, for conflicts between keys and between rules.

The checks use the raw values of the file, so that one invalid key does not hide conflicts elsewhere.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import ValidationError

from vgpud.model.quantity import format_bytes
from vgpud.policy.fields import Match
from vgpud.policy.locate import KeyPath, spell
from vgpud.policy.model import MAX_RULES, MODES_WITH_SETTINGS, QuotaRule, modes_of
from vgpud.policy.origin import Origin, Problem

# UUID of a physical GPU as nvmlDeviceGetUUID and nvidia-smi -L give it
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_QUOTA_NAMES = ("users", "groups", "uids", "gids")
_MAY_BE_ROOT = {("users", "root"), ("uids", 0)}

Where = Callable[[KeyPath], Origin]


@dataclass(frozen=True, slots=True)
class _Rule:
    """One [[device]] rule before it is validated. `match` is None if it is invalid."""

    path: KeyPath
    raw: Mapping[str, Any]
    match: Match | None

    @property
    def mode(self) -> object:
        return self.raw.get("mode", "auto")


def check_quotas(data: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Problems of quotas in `data` that can never apply. A quota without names does not cover root, and root
    may be a member of a group, so a quota with groups may stand behind it.
    """
    elements = data.get("quota", [])
    if not isinstance(elements, list) or len(elements) > MAX_RULES:
        return
    named: set[tuple[str, str | int]] = set()
    all_users = ""  # the first quota without names
    for number, element in enumerate(elements):
        try:
            rule = QuotaRule.model_validate(element)
        except ValidationError:  # the validation of the model reports it
            continue
        path = ("quota", number)
        names = {(key, name) for key in _QUOTA_NAMES for name in getattr(rule, key)}
        if all_users and not any(one in _MAY_BE_ROOT or one[0] in ("groups", "gids") for one in names):
            sentence = f"can never apply: {all_users} comes first and covers every user but root"
            yield _problem(path, where, sentence, "put the quota that names users first")
        elif names and names <= named:
            sentence = "can never apply: quotas before it cover every user and group that it names"
            yield _problem(path, where, sentence, "remove it, or put it first")
        named |= names
        if not names:
            all_users = all_users or f"{spell(path)} (line {where(path).line})"


def check_rules(data: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Problems of the [[device]] rules in `data`, in no particular order."""
    elements = data.get("device", [])
    if not isinstance(elements, list) or len(elements) > MAX_RULES:
        return
    rules = [
        _Rule(("device", number), element, _match(element))
        for number, element in enumerate(elements)
        if isinstance(element, dict)
    ]
    for number, rule in enumerate(rules):
        yield from _settings_of_another_mode(rule, where)
        if rule.match is not None:
            yield from _hopeless_match(rule, rule.match, where)
            yield from _hidden(rule, rule.match, rules[:number], where)


def subsumes(wide: Match, narrow: Match) -> bool:
    """True if `wide` certainly covers every device that `narrow` covers."""
    return (
        (wide.uuid is None or wide.uuid == narrow.uuid)
        and (wide.index is None or (narrow.index is not None and set(narrow.index) <= set(wide.index)))
        and (wide.name is None or (narrow.name is not None and _glob_subsumes(wide.name, narrow.name)))
        and (
            wide.memory_min is None
            or (narrow.memory_min is not None and narrow.memory_min >= wide.memory_min)
        )
        and (
            wide.memory_max is None
            or (narrow.memory_max is not None and narrow.memory_max <= wide.memory_max)
        )
        and (wide.mig_capable is None or wide.mig_capable == narrow.mig_capable)
    )


def _glob_subsumes(wide: str, narrow: str) -> bool:
    if wide == narrow:
        return True
    # If `wide` has no wildcard other than stars, and they match the text of pattern `narrow`, they also match
    # every name that `narrow` matches. Brackets are excluded: the pattern "[ab]" is longer than its matches.
    return not set("?[") & set(wide) and "[" not in narrow and fnmatchcase(narrow, wide)


def _match(element: Mapping[str, Any]) -> Match | None:
    try:
        return Match.model_validate(element.get("match", {}))
    except ValidationError:
        return None


def _settings_of_another_mode(rule: _Rule, where: Where) -> Iterator[Problem]:
    # the validation of the model reports a mode that does not exist
    if rule.mode not in (*MODES_WITH_SETTINGS, "unmanaged"):
        return
    for name in MODES_WITH_SETTINGS:
        if name in rule.raw and rule.mode not in modes_of(name):
            yield _problem(
                (*rule.path, name),
                where,
                f"settings of mode {name} stand in a rule whose mode is {rule.mode}",
                f'remove them, or set mode = "{name}" or "auto"',
            )


def _hopeless_match(rule: _Rule, match: Match, where: Where) -> Iterator[Problem]:
    path = (*rule.path, "match")
    low, high = match.memory_min, match.memory_max
    if low is not None and high is not None and low > high:
        yield _problem(
            (*path, "memory_min"),
            where,
            f"no device has at least {format_bytes(low)} and at most {format_bytes(high)}",
            "exchange memory_min and memory_max",
        )
    if match.uuid is not None and not _UUID.fullmatch(match.uuid):
        yield _problem(
            (*path, "uuid"),
            where,
            f"{match.uuid[:50]!r} is not the UUID of a whole device",
            "copy it from nvidia-smi -L: GPU- and 36 lower-case characters",
        )
    if match.mig_capable is False and rule.mode == "mig":
        yield _problem(
            (*rule.path, "mode"),
            where,
            "mode mig on devices that MIG cannot partition",
            "set match.mig_capable = true, or another mode",
        )


def _hidden(rule: _Rule, match: Match, earlier: list[_Rule], where: Where) -> Iterator[Problem]:
    for other in earlier:
        if other.match is None or not subsumes(other.match, match):
            continue
        first = f"{spell(other.path)} (line {where(other.path).line})"
        if other.match == match:
            sentence = f"has the same match as {first}, so it can never apply"
            hint = "remove one of the two"
        else:
            sentence = f"can never apply: {first} comes first and covers every device that it covers"
            hint = "put the narrower rule first"
        yield _problem(rule.path, where, sentence, hint)
        return


def _problem(path: KeyPath, where: Where, sentence: str, hint: str) -> Problem:
    return Problem(where(path), spell(path), sentence, hint)
