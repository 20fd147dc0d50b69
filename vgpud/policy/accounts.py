"""Reports users and groups in quotas that the host does not have. Pure: lookups in its databases are
passed in as functions.
"""

from collections.abc import Callable, Iterator

from vgpud.policy.load import LoadedPolicy
from vgpud.policy.model import Policy
from vgpud.policy.origin import BUILT_IN, Problem

Has = Callable[[str], bool]


def needs_accounts(policy: Policy) -> bool:
    """True if a quota needs more than the user's uid, that is, the user's name or groups."""
    return any(rule.goes_by_account for rule in policy.quota)


def unknown_names(loaded: LoadedPolicy, has_user: Has, has_group: Has) -> Iterator[Problem]:
    """Reports users and groups in quotas that the host's databases do not have."""
    for number, rule in enumerate(loaded.policy.quota):
        for key, names, has in (("users", rule.users, has_user), ("groups", rule.groups, has_group)):
            missing = [name for name in names if not has(name)]
            if missing:
                path = f"quota[{number}].{key}"
                origin = loaded.origins.get(path, BUILT_IN)
                sentence = f"this host has no {key.removesuffix('s')} {', '.join(missing)}"
                yield Problem(origin, path, sentence, f"see 'getent {_DATABASES[key]} NAME'")


_DATABASES = {"users": "passwd", "groups": "group"}
