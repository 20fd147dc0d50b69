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

UNITS: dict[str, int] = {
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
_BINARY = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_AMBIGUOUS = {"k": "K", "m": "M", "g": "G", "t": "T"}
_SHAPE = re.compile(r"(?P<whole>[0-9]+)(?:\.(?P<fraction>[0-9]+))? *(?P<unit>[A-Za-z]*)")
# maximum of bytes: more than any memory, and far below the range of the lease's 64-bit words
MAX_BYTES = 2**56
# Maximum length of a quantity's text. It also bounds the work of int() and the length of messages.
_MAX_TEXT = 64
_NO_LIMIT_HINT = "ask for at least 1MiB, or leave it out"


def parse_bytes(text: str) -> int:
    """Parses a quantity such as "4GiB", "1.5GiB", "512 MiB" or "80GB" into bytes.

    The arithmetic uses integers only, so nothing is rounded. Raises VgpuError(BAD_QUANTITY) for anything that
    is not a positive whole number of bytes.
    """
    bare = text.strip()
    if len(bare) > _MAX_TEXT:
        raise _bad(bare, f"it has {len(bare)} characters", "write it as in 4GiB, 1.5GiB or 80GB")
    match = _SHAPE.fullmatch(bare)
    if match is None:
        if bare.startswith("-"):
            raise _bad(bare, "it must be more than 0", _NO_LIMIT_HINT)
        raise _bad(bare, "it is not a number with a unit", "write it as in 4GiB, 1.5GiB or 80GB")
    fraction = match["fraction"] or ""
    if not int(match["whole"] + fraction):
        raise _bad(bare, "it must be more than 0", _NO_LIMIT_HINT)
    factor = UNITS.get(match["unit"])
    if factor is None:
        raise _unknown_unit(bare, bare.removesuffix(match["unit"]).rstrip(), match["unit"])
    scaled = int(match["whole"] + fraction) * factor
    value, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        raise _bad(
            bare,
            f"it lies between {value} and {value + 1} bytes",
            "use a fraction that comes out in whole bytes",
        )
    return check_bytes(value, bare)


def check_bytes(value: int, text: str | None = None) -> int:
    """Returns `value` if it is a valid amount of memory. Raises VgpuError(BAD_QUANTITY) otherwise."""
    if value <= 0:
        raise _bad(text or _shown(value), "it must be more than 0", _NO_LIMIT_HINT)
    if value > MAX_BYTES:
        raise _bad(text or _shown(value), "it is more than any device holds", "check the unit")
    return value


def check_limit(value: int) -> int:
    """Returns `value` if it is a valid limit of a tenant's memory: at least 1 MiB. Raises
    VgpuError(BAD_QUANTITY) otherwise.
    """
    if 0 < value < MIB:
        raise _bad(format_bytes(value), "it is less than 1MiB", _NO_LIMIT_HINT)
    return check_bytes(value)


def _shown(value: int) -> str:
    # a large integer is shown as a power of two, because Python refuses to print integers with more than 4300
    # digits
    bits = value.bit_length()
    return str(value) if bits <= 256 else f"{'-' if value < 0 else ''}2**{bits - 1} or more"


def _unknown_unit(text: str, number: str, unit: str) -> VgpuError:
    if unit == "":
        return _bad(text, "it has no unit", f"say {number}MiB, {number}GiB or {number}B")
    lower = unit.lower()
    letter = _AMBIGUOUS.get(lower) or _AMBIGUOUS.get(lower.removesuffix("b"))
    if letter is not None:
        decimal = "kB" if letter == "K" else f"{letter}B"
        return _bad(
            text,
            f"{unit!r} can mean 1000s or 1024s",
            f"say {number}{letter}iB (1024s) or {number}{decimal} (1000s)",
        )
    known = next((name for name in UNITS if name.lower() == lower), None)
    hint = f"say {number}{known}" if known else "use KiB, MiB, GiB, TiB, kB, MB, GB or TB"
    return _bad(text, f"unit {unit!r} is not known", hint)


def _bad(text: str, why: str, hint: str) -> VgpuError:
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return VgpuError(ErrorCode.BAD_QUANTITY, f"bad amount of memory {shown!r}: {why}", hint)


def format_bytes(value: int) -> str:
    """The exact text of a number of bytes in the largest binary unit that divides it. `parse_bytes` reads the
    text back, except "0B".
    """
    for unit, factor in _BINARY:
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return f"{value}B"


def show_bytes(value: int) -> str:
    """A rounded text of a number of bytes for people: at most one decimal, in the largest unit in which the
    value is at least 1.
    """
    for unit, factor in _BINARY:
        # a value that would round to 1024 of the next smaller unit is shown as 1 of this unit
        if value * 1024 >= factor * 1023.95:
            amount = f"{value / factor:.1f}".removesuffix(".0")
            return f"{amount}{unit}"
    return f"{value}B"


@dataclass(frozen=True, slots=True, order=True)
class Percent:
    """A share of a device, in hundredths of a percent: 1 to 10000 means 0.01 % to 100 %."""

    hundredths: int

    def __post_init__(self) -> None:
        if not 1 <= self.hundredths <= 10000:
            raise _share_out_of_range(f"{self.hundredths} hundredths of a percent")

    @classmethod
    def parse(cls, text: str) -> "Percent":
        """Parses "30", "12.5" or "12.5%". Raises VgpuError(BAD_PERCENT)."""
        bare = text.strip().removesuffix("%").rstrip()
        if len(bare) > _MAX_TEXT or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", bare):
            raise VgpuError(
                ErrorCode.BAD_PERCENT,
                f"bad share {text[:_MAX_TEXT]!r}: it is not a percentage",
                "write it as in 30 or 12.5",
            )
        whole, _, fraction = bare.partition(".")
        decimals = fraction.rstrip("0")
        if len(decimals) > 2:
            raise _share_too_fine(text)
        hundredths = int(whole) * 100 + int(decimals.ljust(2, "0"))
        if not 1 <= hundredths <= 10000:
            raise _share_out_of_range(repr(text))
        return cls(hundredths)

    @classmethod
    def from_float(cls, value: float) -> "Percent":
        """Converts a number from the API or a TOML file. Raises VgpuError(BAD_PERCENT) if it is out of range
        or has more than two decimals.
        """
        if isinstance(value, float) and not math.isfinite(value):
            raise VgpuError(
                ErrorCode.BAD_PERCENT, f"bad share {value}: it is not a number", "write it as in 12.5"
            )
        if not 0 < value <= 100:
            raise _share_out_of_range(f"{value:g}" if abs(value) < 1e300 else "beyond all figures")
        # repr gives the shortest decimal for the double: the double nearest to 12.34 is read as 12.34
        hundredths = Decimal(repr(value)) * 100
        if hundredths != hundredths.to_integral_value():
            raise _share_too_fine(repr(value))
        return cls(int(hundredths))

    @property
    def value(self) -> float:
        """The percentage as a float; exact to two decimals when printed."""
        return self.hundredths / 100

    def __str__(self) -> str:
        return f"{self.value:g}%"


def _share_out_of_range(shown: str) -> VgpuError:
    return VgpuError(
        ErrorCode.BAD_PERCENT,
        f"bad share {shown}: it must be from 0.01 to 100",
        "leave the share out to ask for no compute limit",
    )


def _share_too_fine(shown: str) -> VgpuError:
    return VgpuError(
        ErrorCode.BAD_PERCENT,
        f"bad share {shown!r}: it has more than two decimals",
        "round it to hundredths of a percent",
    )


WHOLE = Percent(10000)


def counted(number: int, noun: str) -> str:
    """The number and the noun in the right form, as in "1 device", "2 devices", "2 processes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"
