"""Parses layouts and computes them for one card. Pure.

A layout is a list of words. Each word is a profile (its name without "MIG", or NVML's profile id), with
"@START" for a memory slice and "*N" for several instances; or the list is one of the words below. If no place
is given, the planner chooses the places that change the fewest existing instances. mig_parts.py handles words
for parts of GPU instances (1c.3g.71gb).
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from vgpud.model.device import MigProfile
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.planner.geometry import ComputeKey, Layout, MigGeometry, SlotKey, mask_of
from vgpud.planner.terms import bare_name
from vgpud.planner.words import listed

# layout word: instances of a half, a quarter and eighths of the card, as in mig-parted's configuration
BALANCED = "all-balanced"
NONE = "none"  # layout word: no instances, and MIG mode on
OFF = "off"  # layout word: MIG mode off
AUTO = "auto"  # layout word: no fixed layout; an instance is created for an allocation and destroyed with it
ALL = "all-"  # beginning of a layout word: all-PROFILE means as many instances as fit
SPECIAL = (BALANCED, NONE, OFF, AUTO)

_WORD = re.compile(r"(?P<profile>[^@*\s]+)(@(?P<start>[0-9]{1,2})|\*(?P<count>[0-9]{1,2}))?")


class Entry(NamedTuple):
    """One word of a layout: `times` instances of a profile, or one instance at `start`."""

    profile: str
    start: int | None
    times: int


class Blocked(NamedTuple):
    """A layout that is impossible now, because these pinned instances block it."""

    pinned: tuple[SlotKey, ...]


def parse(words: Sequence[str]) -> tuple[Entry, ...]:
    """Parses the words of a layout. Raises VgpuError(BAD_REQUEST), which names the invalid word."""
    return tuple(_entry(word) for word in words)


def _entry(word: str) -> Entry:
    found = _WORD.fullmatch(word.strip().lower())
    if found is None:
        raise _bad(f"{word!r} is not a part of a MIG layout")
    start, count = found["start"], found["count"]
    if count is not None and int(count) == 0:
        raise _bad(f"{word!r} asks for no instance")
    return Entry(found["profile"], None if start is None else int(start), int(count or 1))


def _bad(sentence: str) -> VgpuError:
    return VgpuError(
        ErrorCode.BAD_REQUEST, sentence, f"write it as in 3g.71gb@4 1g.18gb*2, or one of {listed(SPECIAL)}"
    )


def target(geometry: MigGeometry, layout: Layout, pinned: int, words: Sequence[str]) -> int | Blocked:
    """The state that `words` describe. Of several, the one that changes the fewest instances of `layout`.

    `pinned` instances stay: Blocked if they prevent it. Raises VgpuError: BAD_REQUEST for an invalid word,
    IMPOSSIBLE for a layout that the card can never have. Callers handle the words AUTO and OFF, which
    describe no instances.
    """
    fixed, counts = wanted(geometry, words)
    states = [state for state in geometry.with_counts.get(counts, ()) if not fixed & ~state]
    if not states:
        raise VgpuError(
            ErrorCode.IMPOSSIBLE,
            f"the card has no layout with {' '.join(words)}",
            f"'vgpuctl mig plan all-{re.split('[@*]', words[0])[0]}' shows how many of one profile fit",
        )
    free = [state for state in states if not pinned & ~state and not state & layout.blocked]
    if free:
        return min(free, key=lambda state: _cost(geometry, layout, state))
    least = min(states, key=lambda state: ((pinned & ~state).bit_count(), *_cost(geometry, layout, state)))
    return Blocked(geometry.keys(pinned & ~least))


def _cost(geometry: MigGeometry, layout: Layout, state: int) -> tuple[int, int, int]:
    return (layout.slots & ~state).bit_count(), -geometry.worth(geometry.free_after[state]), state


def wanted(geometry: MigGeometry, words: Sequence[str]) -> tuple[int, int]:
    """The slots whose place the words name, and the counts per profile (MigGeometry.packed). Raises as
    `target`.
    """
    if not geometry.profiles:
        raise VgpuError(ErrorCode.UNSUPPORTED, "the device has no MIG profiles", "name another device")
    if tuple(words) == (NONE,) or not words:
        return 0, 0
    if tuple(words) == (BALANCED,):
        return 0, geometry.packed(_balanced(geometry))
    if len(words) == 1 and words[0].startswith(ALL):
        return 0, _as_many(geometry, find_profile(geometry, words[0].removeprefix(ALL)))
    entries = parse(words)
    profiles = [(entry, find_profile(geometry, entry.profile)) for entry in entries]
    placed = [(profile, entry.start) for entry, profile in profiles if entry.start is not None]
    fixed = mask_of(_slot(geometry, entry, profile) for entry, profile in profiles if entry.start is not None)
    if fixed.bit_count() < len(placed):
        profile, start = next(one for one in placed if placed.count(one) > 1)
        raise VgpuError(
            ErrorCode.IMPOSSIBLE,
            f"the layout has {bare_name(profile.name)} at memory slice {start} more than once",
            "name another place, or leave the place out",
        )
    several = [profile.id for entry, profile in profiles for _ in range(entry.times)]
    if len(several) > max(profile.instance_count for profile in geometry.profiles) + 1:
        return fixed, -1  # no card has so many instances, and the packed counts would overflow
    return fixed, geometry.packed(several)


def find_profile(geometry: MigGeometry, text: str) -> MigProfile:
    """The profile with this name or id. If a board has two profiles with the same name, only the id is valid.

    Raises VgpuError: BAD_REQUEST for an ambiguous name or a whole layout, IMPOSSIBLE for an unknown name.
    """
    if text in SPECIAL or text.startswith(ALL):
        raise VgpuError(ErrorCode.BAD_REQUEST, f"{text!r} is a whole layout", "give it without other words")
    found = [p for p in geometry.profiles if bare_name(p.name) == bare_name(text) or str(p.id) == text]
    if len(found) == 1:
        return found[0]
    names = listed(tuple(f"{bare_name(p.name)} ({p.id})" for p in found or geometry.profiles))
    if found:
        raise VgpuError(
            ErrorCode.BAD_REQUEST,
            f"{len(found)} profiles have the name {text!r}: {names}",
            "name it by its id",
        )
    close = get_close_matches(text[:32], (*SPECIAL, *(bare_name(p.name) for p in geometry.profiles)), n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise VgpuError(ErrorCode.IMPOSSIBLE, f"the card has no profile {text!r}", f"{meant}it has {names}")


def _slot(geometry: MigGeometry, entry: Entry, profile: MigProfile) -> int:
    for place in profile.placements:
        if place.start == entry.start:
            return geometry.number[profile.id, place]
    starts = listed(tuple(str(place.start) for place in profile.placements))
    raise VgpuError(
        ErrorCode.IMPOSSIBLE,
        f"profile {entry.profile} cannot be placed at memory slice {entry.start}",
        f"it can be placed at {starts}",
    )


def _as_many(geometry: MigGeometry, profile: MigProfile) -> int:
    unit = geometry.unit(profile.id)
    return max(n * unit for n in range(profile.instance_count + 1) if n * unit in geometry.with_counts)


def _balanced(geometry: MigGeometry) -> Iterable[int]:
    """The profiles of layout all-balanced: one instance of half the card, one of a quarter, and the smallest
    in the remaining slices.

    If several profiles have the same size, the plain profile is the one that fills the card with most compute
    slices. Variants (+me, +gfx) have smaller instance counts or later ids.
    """
    size = max(place.size for profile in geometry.profiles for place in profile.placements)
    found: list[int] = []
    for part in (size // 2, size // 4):
        profile = _plain(geometry, part)
        if part > 1 and profile is not None:
            found.append(profile.id)
    smallest = _plain(geometry, 1)
    while smallest is not None and geometry.packed([*found, smallest.id]) in geometry.with_counts:
        found.append(smallest.id)
    return found


def _plain(geometry: MigGeometry, size: int) -> MigProfile | None:
    fitting = [p for p in geometry.profiles if p.placements and p.placements[0].size == size]
    return max(fitting, key=lambda p: (p.slice_count * p.instance_count, -p.id), default=None)


def spell(
    geometry: MigGeometry, keys: Iterable[SlotKey], computes: Iterable[ComputeKey] = ()
) -> tuple[str, ...]:
    """The words for these slots and their parts, with places, in the form that `parse` accepts. An ambiguous
    name becomes an id.
    """
    names = [bare_name(profile.name) for profile in geometry.profiles]
    by_id = {profile.id: profile for profile in geometry.profiles}
    parts: dict[SlotKey, list[int]] = {}
    for key, part in computes:
        parts.setdefault(key, []).append(part[1].size)
    words = []
    for key in sorted(keys, key=lambda key: (key[1], key[0])):
        name = bare_name(by_id[key[0]].name)
        name = name if names.count(name) == 1 else str(key[0])
        sizes = sorted(parts.get(key, ()), reverse=True)
        words += [f"{size}c.{name}@{key[1].start}" for size in sizes] or [f"{name}@{key[1].start}"]
    return tuple(words)
