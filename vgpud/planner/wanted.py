"""The checked form of a request: the modes that can serve it, and its figures."""

from dataclasses import dataclass

from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.quantity import WHOLE, Percent, check_limit
from vgpud.model.tenancy import MODE_OF, Isolation, Mode, Request


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request. `modes` are those that can serve it, the best first.

    `share` is None for unlimited compute. `profile` is the caller's text without the memory slice; `start` is
    that memory slice, or None for any.
    """

    modes: tuple[Mode, ...]
    memory_bytes: int | None
    share: Percent | None
    count: int
    profile: str
    start: int | None = None

    @property
    def limits_compute(self) -> bool:
        return self.share is not None and self.share != WHOLE

    @property
    def needs(self) -> str:
        """The modes that can serve the request, as part of a sentence: "mps or preload"."""
        return " or ".join(self.modes)


def wanted(request: Request) -> Wanted:
    """Checks a request. Raises VgpuError(BAD_REQUEST or BAD_QUANTITY) if it contradicts itself."""
    if request.count < 1:
        raise _bad(f"count is {request.count}: it must be at least 1", "leave it out to ask for one device")
    if request.memory_bytes is not None:
        check_limit(request.memory_bytes)
    _check_isolation(request)
    profile, start = _place(request.mig_profile)
    return Wanted(
        modes=_modes(request),
        memory_bytes=request.memory_bytes,
        share=request.share,
        count=request.count,
        profile=profile,
        start=start,
    )


def _place(text: str) -> tuple[str, int | None]:
    """Splits a profile's text from its memory slice, written as in layouts: 3g.71gb@4."""
    profile, at, start = text.partition("@")
    if not at:
        return text, None
    if not (profile.strip() and start.isascii() and start.isdecimal() and len(start) <= 2):
        raise _bad(f"{text!r} is not a MIG profile and a memory slice", "write it as in 3g.71gb@4")
    return profile, int(start)


def _modes(request: Request) -> tuple[Mode, ...]:
    """The modes that can serve a request. Without an isolation, a part of a card may come from any mode that
    divides cards.

    An idle device of mode `auto` takes the first of these modes; the others serve on devices that are already
    in them.
    """
    if request.isolation is not None:
        return (MODE_OF[request.isolation],)
    if request.mig_profile:
        return (Mode.MIG,)
    if request.whole_device:
        return (Mode.EXCLUSIVE,)
    return (Mode.PRELOAD, Mode.MPS, Mode.MIG)


def _check_isolation(request: Request) -> None:
    isolation = request.isolation
    if request.mig_profile and isolation is Isolation.DEVICE:
        raise _bad(
            f"MIG profile {request.mig_profile!r} was requested with isolation {isolation}",
            f"leave the profile out, or ask for isolation {Isolation.HARDWARE}",
        )
    if request.priority and isolation not in (Isolation.COMPUTE, Isolation.QUOTA):
        other = "" if request.priority == "above-normal" else f" or {Isolation.COMPUTE}"
        raise _bad(
            f"priority {request.priority} was requested with isolation {isolation or 'left out'}",
            f"ask for isolation {Isolation.QUOTA}{other}, or leave the priority out",
        )
    if request.priority == "above-normal" and isolation is Isolation.COMPUTE:
        raise _bad(
            f"priority {request.priority} was requested with isolation {isolation}, which has none (MPS)",
            f"ask for isolation {Isolation.QUOTA}, or for priority normal",
        )
    if request.priority == "above-normal" and request.share is None:
        raise _bad(
            f"priority {request.priority} was requested without a share, and it applies only within a share",
            "ask for a share too (--cores), or for priority normal",
        )
    divided = request.memory_bytes is not None or request.share not in (None, WHOLE)
    if isolation is Isolation.DEVICE and divided:
        raise _bad(
            "a whole device was requested together with a memory limit or a share",
            f"leave memory and share out, or ask for isolation {Isolation.QUOTA}",
        )
    nothing = request.memory_bytes is None and request.share is None
    if isolation in (Isolation.COMPUTE, Isolation.QUOTA) and nothing:
        raise _bad(
            f"isolation {isolation} was requested with neither memory nor share",
            f"say how much, or ask for isolation {Isolation.DEVICE} to take a whole card",
        )


def _bad(sentence: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_REQUEST, sentence, hint)
