"""Makes the refusal of a request: the error number, the sentence, and a hint that says what would fit."""

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

from vgpud.model.device import Device
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import counted
from vgpud.model.tenancy import Mode
from vgpud.planner.terms import bare_name
from vgpud.planner.verdict import Fit, Room, Unfit, Verdict
from vgpud.planner.wanted import Wanted
from vgpud.planner.words import DRAINED, listed, shown_bytes, shown_share

# The order of causes, if devices have different ones: the cause that the caller can change most easily comes
# first.
_GRAVITY = (
    ErrorCode.IMPOSSIBLE,
    ErrorCode.UNSUPPORTED,
    ErrorCode.DENIED_BY_POLICY,
    ErrorCode.RESET_NEEDED,
    ErrorCode.NVML_TIMEOUT,
    ErrorCode.GPU_LOST,
)
_Left = tuple[Room, Device]


def refuse(want: Wanted, verdicts: Sequence[Verdict], details: tuple[str, ...]) -> VgpuError:
    """The refusal of a request. `verdicts` are those on the selected devices, too few of which fit.

    The code is NO_CAPACITY if enough devices could serve the request, in one mode, without their present
    allocations.
    """
    fits = tuple(verdict for verdict in verdicts if isinstance(verdict, Fit))
    unfit = tuple(verdict for verdict in verdicts if isinstance(verdict, Unfit))
    nevers = tuple(verdict for verdict in unfit if not verdict.busy)
    able = Counter(v.mode for v in verdicts if isinstance(v, Fit) or v.busy)
    for mode in want.modes:
        if able[mode] >= want.count:
            return _no_capacity(want, mode, fits, unfit, details)
    if able:
        return _too_many(want, max(able.values()), len(verdicts), nevers, details)
    return _impossible(want, nevers, details)


def _no_capacity(
    want: Wanted, mode: Mode, fits: tuple[Fit, ...], unfit: tuple[Unfit, ...], details: tuple[str, ...]
) -> VgpuError:
    rivals = tuple(v for v in unfit if v.busy and v.mode is mode)
    foreign = bool(rivals) and all(v.foreign for v in rivals)
    waiting = f"or wait until {'those processes end' if foreign else 'something is released'}"
    fitting = sum(fit.mode is mode for fit in fits)
    if fitting or (mode is Mode.EXCLUSIVE and want.count > 1):
        sentence = f"{counted(want.count, 'device')} asked, {fitting or 'none'} with room in mode {mode} now"
        hint = f"ask for {fitting}, {waiting}" if fitting else _capital(waiting)
        return VgpuError(ErrorCode.NO_CAPACITY, sentence, hint, details)
    closed = tuple(v for v in unfit if v.closed and v.mode is mode)
    if closed and len(closed) == len(rivals):
        return _all_closed(closed[0], len({v.device.uuid for v in unfit if v.closed}), details)
    if mode is Mode.EXCLUSIVE:
        return VgpuError(ErrorCode.NO_CAPACITY, "no whole device is free now", _capital(waiting), details)
    rooms = tuple((v.room, v.device) for v in rivals)
    if mode is Mode.MIG:
        return _no_instance(want, rooms, waiting, details)
    return _no_quota(want, mode, rooms, waiting, details)


def _all_closed(first: Unfit, devices: int, details: tuple[str, ...]) -> VgpuError:
    """The refusal if all devices that could serve the request are closed to it now."""
    more = f" (and {counted(devices - 1, 'device')} more closed)" if devices > 1 else ""
    drained = first.sentence == DRAINED
    hint = f"'vgpuctl undrain {first.device.index}' opens it" if drained else "wait until it is open"
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"device {first.device.index} accepts no such request now: {first.sentence}{more}",
        hint + ", or allow other devices",
        details,
    )


def _no_instance(want: Wanted, rooms: tuple[_Left, ...], waiting: str, details: tuple[str, ...]) -> VgpuError:
    free = tuple(dict.fromkeys(name for room, _ in rooms for name in room.profiles))
    asked = bare_name(want.profile) if want.profile else _asked(want)
    hint = f"free now are {listed(free)}: ask for one of them, {waiting}" if free else _capital(waiting)
    return VgpuError(
        ErrorCode.NO_CAPACITY, f"no device has a place for a MIG instance of {asked} now", hint, details
    )


def _no_quota(
    want: Wanted, mode: Mode, rooms: tuple[_Left, ...], waiting: str, details: tuple[str, ...]
) -> VgpuError:
    sentence = f"no device has {_asked(want)} free in mode {mode} now"
    room, device = max(rooms, key=lambda left: left[0][:2])
    if not room.memory_bytes:
        return VgpuError(ErrorCode.NO_CAPACITY, sentence, _capital(waiting), details)
    left = f"{shown_bytes(room.memory_bytes)} of memory"
    if want.share is not None:
        left += f" and a share of {shown_share(room.share_hundredths)}"
    return VgpuError(
        ErrorCode.NO_CAPACITY,
        f"{sentence}: the most is {left} on device {device.index}",
        f"ask for no more than that, {waiting}",
        details,
    )


def _too_many(
    want: Wanted, able: int, selected: int, nevers: tuple[Unfit, ...], details: tuple[str, ...]
) -> VgpuError:
    causes = {unfit.code for unfit in nevers}
    # A lost card, a card that does not answer or one with a pending reset may recover, so the code is not
    # IMPOSSIBLE.
    passing = causes & {ErrorCode.GPU_LOST, ErrorCode.NVML_TIMEOUT, ErrorCode.RESET_NEEDED}
    code = next((c for c in _GRAVITY if c in passing), ErrorCode.IMPOSSIBLE)
    return VgpuError(
        code,
        f"{counted(want.count, 'device')} requested, and {able} of the {selected} selected devices "
        "can serve in one mode",
        f"ask for at most {able}: each slice is on a separate device",
        details,
    )


def _impossible(want: Wanted, nevers: tuple[Unfit, ...], details: tuple[str, ...]) -> VgpuError:
    code = next(code for code in _GRAVITY if any(unfit.code is code for unfit in nevers))
    causes = tuple(unfit for unfit in nevers if unfit.code is code)
    first = causes[0]
    start = "no device can serve this"
    if code is ErrorCode.IMPOSSIBLE:
        # the cause may name the profile itself
        asked = "this" if want.profile and want.profile in first.sentence else _asked(want)
        start = f"no device can hold {asked}, even idle"
    sentence = f"{start}: device {first.device.index}: {first.sentence}"
    alike = sum(unfit.sentence == first.sentence for unfit in causes) - 1
    if alike:
        sentence += f" (and {counted(alike, 'device')} more alike)"
    return VgpuError(code, sentence, _HINTS.get(code, "") or _largest_hint(want, causes), details)


_HINTS = {
    ErrorCode.DENIED_BY_POLICY: "ask for what the policy allows ('vgpuctl policy show'), or change it",
    ErrorCode.RESET_NEEDED: "when the device is idle, do what the reason asks (reset, reboot, repair)",
    ErrorCode.NVML_TIMEOUT: "wait until its driver answers again, reset the device, or reboot the node",
    ErrorCode.GPU_LOST: "reset the device or reboot the node, its log says what happened",
}


def _largest_hint(want: Wanted, causes: tuple[Unfit, ...]) -> str:
    if causes[0].code is ErrorCode.UNSUPPORTED:
        one = "for one device, or " if want.count > 1 else ""
        return f"ask {one}for another isolation; 'vgpuctl devices -o wide' shows modes and MIG"
    profiles = tuple(dict.fromkeys(name for unfit in causes for name in unfit.largest.profiles))
    if want.profile:
        name = bare_name(want.profile)
        if name in map(bare_name, profiles):
            return "ask for less than the profile has, or leave the profile out"
        close = get_close_matches(name, profiles, n=1)
        return f"did you mean {close[0]!r}" if close else "'vgpuctl mig ls' lists what fits on each device"
    largest = max((unfit.largest for unfit in causes), key=lambda room: room[:2])
    name = f" (profile {largest.profiles[0]})" if largest.profiles else ""
    return f"ask for at most {shown_bytes(largest.memory_bytes)}{name}"


def _asked(want: Wanted) -> str:
    parts = []
    if want.memory_bytes is not None:
        parts.append(shown_bytes(want.memory_bytes))
    if want.share is not None:
        parts.append(f"a share of {want.share}")
    return " and ".join(parts) or (want.profile and f"profile {want.profile}") or "a slice"


def _capital(waiting: str) -> str:
    return waiting.removeprefix("or ")
