"""Removes names of users and hosts, and command lines, from the text of a bug report."""

import re
from collections.abc import Iterable

_PATTERNS = (
    (re.compile(r"\b[0-9a-f]{2}(:[0-9a-f]{2}){5}\b", re.IGNORECASE), "MAC"),
    # Matches an IPv4 address only if no letter, digit or dot precedes or follows it, because a part of a
    # version number can look like an address.
    (
        re.compile(
            r"(?<![\w.])(?!127\.)(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\w.])"
        ),
        "ADDRESS",
    ),
    (re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+"), "MAIL"),
    (re.compile(r"(?im)^(\s*(serial number|board part number|asset tag)\s*[:=]\s*).*$"), r"\1REMOVED"),
    (re.compile(r"/home/[^/\s:\"']+"), "/home/USER"),
)
_KEYS = {
    "label",
    "command",
    "edits",
    "env",
    "hostEnv",
    "hostname",
    "requestId",
    "request",
    "owner",
    "workload",
}
# Lists of names in a [[quota]]. The accounts of a directory service are not among the names of `redact`.
_NAME_LISTS = {"users", "groups"}


def redact(text: str, names: Iterable[tuple[str, str]]) -> str:
    """Replaces names, addresses and serial numbers in a text. `names` are pairs of word and replacement.
    Only whole words are replaced, the longest first.
    """
    for name, instead in sorted(names, key=lambda pair: -len(pair[0])):
        if len(name) > 1:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def without_private(value: object) -> object:
    """Returns a document without the values of _KEYS, such as labels and command lines of tenants, and
    without the names in _NAME_LISTS. A placeholder shows that there was a value.
    """
    if isinstance(value, dict):
        return {
            key: "REMOVED" if inner and _is_private(key, inner) else without_private(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_private(inner) for inner in value]
    return value


def _is_private(key: str, value: object) -> bool:
    return key in _KEYS or (key in _NAME_LISTS and isinstance(value, list))
