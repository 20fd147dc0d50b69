"""The effective policy has every key that applies. A key that no file sets has its default."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from vgpud.model.tenancy import Mode
from vgpud.policy.locate import KeyPath, quote
from vgpud.policy.model import DeviceRule, Policy


def effective(policy: Policy) -> dict[str, Any]:
    """`policy` as plain JSON values, with quantities as text such as "4GiB".

    A rule has the settings of each mode that it allows. Left out are unset keys without a default (match
    keys, MIG profiles), and those tables of [kubelet], [dra], [runtime] and [remote] that are off. The
    result is itself a valid policy.
    """
    filled = policy.model_copy(update={"device": tuple(_filled(rule) for rule in policy.device)})
    doors = {
        "kubelet": policy.kubelet.resource,
        "dra": policy.dra.enabled,
        "runtime": policy.runtime.users,
        "remote": policy.remote.server,
    }
    unserved = {name for name, is_open in doors.items() if not is_open}
    return filled.model_dump(mode="json", exclude_none=True, exclude=unserved)


def digest(policy: Policy) -> str:
    """SHA-256 in hex of the effective policy: comments, the order of keys and explicit defaults make no
    difference.
    """
    text = json.dumps(effective(policy), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """The key paths and values of an effective policy, in order. An array without tables is one value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


def as_toml(value: object) -> str:
    """A value from `leaves` in TOML's syntax."""
    if isinstance(value, list):
        return f"[{', '.join(as_toml(element) for element in value)}]"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _filled(rule: DeviceRule) -> DeviceRule:
    settings = {
        "preload": rule.settings_preload() if rule.allows(Mode.PRELOAD) else None,
        "mps": rule.settings_mps() if rule.allows(Mode.MPS) else None,
        "mig": rule.settings_mig() if rule.allows(Mode.MIG) else None,
        "exclusive": rule.settings_exclusive() if rule.allows(Mode.EXCLUSIVE) else None,
    }
    return rule.model_copy(update=settings)
