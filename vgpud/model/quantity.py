"""Exact quantities: bytes and percentages, as people write them.

Binary units (KiB MiB GiB TiB, or Ki Mi Gi Ti) are powers of 1024, decimal ones (kB MB GB TB)
powers of 1000. A bare letter ("10G", "10g") means either to different people and is refused.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from vgpud.model.errors import ErrorCode, VgpuError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_UNITS: dict[str, int] = {
    "B": 1,
    "KiB": KIB,
    "Ki": KIB,
    "MiB": MIB,
    "Mi": MIB,
    "GiB": GIB,
    "Gi": GIB,
    "TiB": TIB,
    "Ti": TIB,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
}
_AMBIGUOUS = {"k": "K", "m": "M", "g": "G", "t": "T"}
_SHAPE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
# above any memory, and far under what the 64-bit words of the lease hold
MAX_BYTES = 2**56


def parse_bytes(text: str) -> int:
    """Bytes of a quantity such as "4GiB", "1.5GiB", "512 MiB" or "80GB".

    Raises VgpuError(BAD_QUANTITY) for anything that is not a positive whole number of bytes.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise _bad(text, "it is not a number with a unit", "write it as in 4GiB, 1.5GiB or 80GB")
    unit = match["unit"]
    factor = _UNITS.get(unit)
    if factor is None:
        raise _unknown_unit(text, match["number"], unit)
    value = Decimal(match["number"]) * factor
    if value != value.to_integral_value():
        raise _bad(text, f"it is {value} bytes", "use a fraction that comes out in whole bytes")
    return check_bytes(int(value), text)


def check_bytes(value: int, text: str | None = None) -> int:
    """`value` itself, if it can be an amount of memory; raises VgpuError(BAD_QUANTITY) otherwise."""
    shown = text if text is not None else str(value)
    if value <= 0:
        raise _bad(shown, "it must be more than 0", "leave the limit out to ask for no memory limit")
    if value > MAX_BYTES:
        raise _bad(shown, "it is more than any device holds", "check the unit")
    return value


def _unknown_unit(text: str, number: str, unit: str) -> VgpuError:
    if unit == "":
        return _bad(text, "it has no unit", f"say {number}MiB, {number}GiB or {number}B")
    letter = _AMBIGUOUS.get(unit.lower()) or _AMBIGUOUS.get(unit.lower().removesuffix("b"))
    if letter is not None:
        decimal = "kB" if letter == "K" else f"{letter}B"
        return _bad(
            text,
            f"{unit!r} can mean 1000s or 1024s",
            f"say {number}{letter}iB (1024s) or {number}{decimal} (1000s)",
        )
    return _bad(text, f"unit {unit!r} is not known", "use KiB, MiB, GiB, TiB, kB, MB, GB or TB")


def _bad(text: str, why: str, hint: str) -> VgpuError:
    return VgpuError(ErrorCode.BAD_QUANTITY, f"bad amount of memory {text!r}: {why}", hint)


def format_bytes(value: int) -> str:
    """The shortest exact spelling that `parse_bytes` reads back; binary units, "B" if none divides."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return f"{value}B"


def show_bytes(value: int) -> str:
    """Rounded for people: one decimal in the largest unit that leaves at least 1."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= factor:
            amount = f"{value / factor:.1f}".removesuffix(".0")
            return f"{amount}{unit}"
    return f"{value}B"


@dataclass(frozen=True, slots=True, order=True)
class Percent:
    """A share of a device, in hundredths of a percent: 1..10000 is 0.01 %..100 %."""

    hundredths: int

    def __post_init__(self) -> None:
        if not 1 <= self.hundredths <= 10000:
            raise VgpuError(
                ErrorCode.BAD_PERCENT,
                f"bad share {self.hundredths / 100:g} %: it must be from 0.01 to 100",
                "leave the share out to ask for no compute limit",
            )

    @classmethod
    def parse(cls, text: str) -> "Percent":
        """From "30", "12.5" or "12.5%"; raises VgpuError(BAD_PERCENT)."""
        bare = text.strip().removesuffix("%").strip()
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", bare):
            raise VgpuError(
                ErrorCode.BAD_PERCENT,
                f"bad share {text!r}: it is not a percentage",
                "write it as in 30 or 12.5",
            )
        return cls._whole(Decimal(bare) * 100, text)

    @classmethod
    def from_float(cls, value: float) -> "Percent":
        """From a number off the wire or a TOML file; at most two decimals, raises VgpuError."""
        if not math.isfinite(value):
            raise VgpuError(
                ErrorCode.BAD_PERCENT, f"bad share {value}: it is not a number", "write it as in 12.5"
            )
        return cls._whole(Decimal(repr(value)) * 100, repr(value))

    @classmethod
    def _whole(cls, hundredths: Decimal, text: str) -> "Percent":
        if hundredths != hundredths.to_integral_value():
            raise VgpuError(
                ErrorCode.BAD_PERCENT,
                f"bad share {text!r}: it has more than two decimals",
                "round it to hundredths of a percent",
            )
        if not 1 <= hundredths <= 10000:
            raise VgpuError(
                ErrorCode.BAD_PERCENT,
                f"bad share {text!r}: it must be from 0.01 to 100",
                "leave the share out to ask for no compute limit",
            )
        return cls(int(hundredths))

    @property
    def value(self) -> float:
        """As a percentage, exact to two decimals when printed."""
        return self.hundredths / 100

    def __str__(self) -> str:
        return f"{self.value:g}%"


WHOLE = Percent(10000)
