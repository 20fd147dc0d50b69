"""Loads the policy files of a node into one typed policy, with the origin of every key.

Tables of higher layers merge into those of lower ones key by key; any other value, including an array,
replaces the lower one. Each file is also checked by itself, so that every mistake is reported with its file
and line, even if a higher layer hides it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.policy.effective import digest, effective, leaves
from vgpud.policy.layers import PolicyPaths, distrusted, select
from vgpud.policy.locate import KeyPath, spell
from vgpud.policy.model import Policy
from vgpud.policy.origin import BUILT_IN, Origin, Problem
from vgpud.policy.rules import Where, check_quotas, check_rules
from vgpud.policy.source import Source, read
from vgpud.policy.words import explain


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A loaded policy. `origins` has every effective key ("device[0].match.name"); `files` are the files
    read, the lowest layer first.

    `digest` is equal for equal effective policies, even if their files differ.
    """

    policy: Policy
    origins: Mapping[str, Origin]
    files: tuple[Path, ...]
    digest: str


def load(paths: PolicyPaths) -> LoadedPolicy:
    """Loads the policy from these files. Raises VgpuError(BAD_POLICY) with one line of details for each
    mistake.
    """
    files, unlisted = select(paths)
    problems = [*unlisted, *distrusted(paths, files)]
    sources: list[Source] = []
    for path in files:
        source = read(path)
        if isinstance(source, Problem):
            problems.append(source)
            continue
        sources.append(source)
        problems += check_source(source, needs_version=path == paths.main)
    if problems:
        raise bad_policy(problems)
    return assemble(sources)


def check(path: Path) -> LoadedPolicy:
    """Loads the policy from the file `path` alone, without drop-ins. Raises VgpuError(BAD_POLICY).

    A file in a directory called conf.d is a drop-in, which may leave `version` out.
    """
    source = read(path)
    if isinstance(source, Problem):
        raise bad_policy([source])
    problems = check_source(source, needs_version=path.absolute().parent.name != "conf.d")
    if problems:
        raise bad_policy(problems)
    return assemble([source])


def check_source(source: Source, needs_version: bool) -> list[Problem]:
    """Returns the problems of one file by itself, in the order of its lines."""
    problems = list(_problems(source.data, source.origin))
    if needs_version and "version" not in source.data:
        hint = "write version = 1 at the top of the file, before any table"
        problems.append(Problem(Origin(source.path, 1), "version", "is missing", hint))
    return sorted(problems, key=lambda problem: problem.origin.line or 0)


def assemble(sources: Sequence[Source]) -> LoadedPolicy:
    """Merges files that are valid by themselves into one policy. Raises VgpuError(BAD_POLICY)."""

    def where(path: KeyPath) -> Origin:
        return origin_of(path, sources)

    data: Mapping[str, Any] = reduce(deep_merge, (source.data for source in sources), {})
    problems = list(_problems(data, where))
    if problems:
        raise bad_policy(problems)
    policy = Policy.model_validate(data)
    origins = {spell(path): where(path) for path, _ in leaves(effective(policy))}
    files = tuple(source.path for source in sources)
    return LoadedPolicy(policy, MappingProxyType(origins), files, digest(policy))


def deep_merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` merged over `low`: tables key by key; any other value, including an array, is replaced."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = deep_merge(below, value)
        else:
            merged[key] = value
    return merged


def origin_of(path: KeyPath, sources: Sequence[Source]) -> Origin:
    """The origin of a key: the highest file that sets `path`; for a path inside an array, the file that sets
    the whole array.

    Precondition: each source is valid by itself, so that a path is a table in all of them or in none.
    """
    first_number = next((at for at, part in enumerate(path) if isinstance(part, int)), len(path))
    for source in reversed(sources):
        if source.has(path):
            return source.origin(path)
        if first_number < len(path) and source.has(path[:first_number]):
            break
    return BUILT_IN


def bad_policy(problems: Sequence[Problem]) -> VgpuError:
    """One error that reports all of `problems`."""
    details = tuple(str(problem) for problem in problems)
    if len(problems) == 1:
        only = problems[0]
        place = f"{only.origin}: {only.key}" if only.key else str(only.origin)
        return VgpuError(ErrorCode.BAD_POLICY, f"{place}: {only.sentence}", only.hint, details)
    files = len({problem.origin.file for problem in problems})
    sentence = f"the policy has {len(problems)} errors in {files} file{'s' if files > 1 else ''}"
    hint = "correct them all; vgpuctl policy check FILE tries a file without loading it"
    return VgpuError(ErrorCode.BAD_POLICY, f"{sentence}, the first at {details[0]}", hint, details)


def _problems(data: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    try:
        Policy.model_validate(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            yield Problem(where(detail["loc"]), spell(detail["loc"]), *explain(detail))
    yield from check_rules(data, where)
    yield from check_quotas(data, where)
