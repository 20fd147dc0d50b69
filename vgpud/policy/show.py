"""The policy for people: a check of one file, and every effective key with where it comes from."""

from pathlib import Path
from typing import NamedTuple

from vgpud.policy.effective import as_toml, effective, leaves
from vgpud.policy.load import LoadedPolicy, assemble, bad_policy, check_source
from vgpud.policy.locate import spell
from vgpud.policy.origin import Problem
from vgpud.policy.source import read

DROP_IN_DIRECTORY = "conf.d"


class Row(NamedTuple):
    """One effective key: its path, its value as TOML, and "file:line" or "built-in"."""

    key: str
    value: str
    origin: str


def check(path: Path) -> LoadedPolicy:
    """The policy of the file `path` alone, drop-ins left aside; raises VgpuError(BAD_POLICY).

    A file in a directory called conf.d is taken for a drop-in, which may leave `version` out.
    """
    source = read(path)
    if isinstance(source, Problem):
        raise bad_policy([source])
    problems = check_source(source, needs_version=path.absolute().parent.name != DROP_IN_DIRECTORY)
    if problems:
        raise bad_policy(problems)
    return assemble([source])


def render_with_origins(loaded: LoadedPolicy) -> list[Row]:
    """Every effective key in the order of the model, rules in the order in which they are tried."""
    return [
        Row(spell(path), as_toml(value), str(loaded.origins[spell(path)]))
        for path, value in leaves(effective(loaded.policy))
    ]
