"""Parses and prints amounts in the form of the Kubernetes API (apimachinery's resource.Quantity)."""

import re
from decimal import ROUND_CEILING, Decimal

from vgpud.model.errors import ErrorCode, VgpuError

_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SHAPE = re.compile(
    r"\+?(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_LONGEST = 64


def parse(text: str) -> int:
    """Parses a quantity into a whole number, rounded up as Kubernetes does. Raises
    VgpuError(BAD_QUANTITY).
    """
    match = _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise VgpuError(
            ErrorCode.BAD_QUANTITY,
            f"{text[:_LONGEST]!r} is not a quantity of Kubernetes",
            "write it as in 7Gi",
        )
    number, suffix = Decimal(match["number"]), match["suffix"] or ""
    if suffix in _BINARY:
        scaled = number * (1 << _BINARY[suffix])
    elif suffix in _DECIMAL:
        scaled = number.scaleb(_DECIMAL[suffix])
    else:
        scaled = number.scaleb(int(suffix[1:]))
    return int(scaled.to_integral_value(ROUND_CEILING))


def show(value: int) -> str:
    """The exact text of a number in the largest binary unit that divides it."""
    for suffix, bits in reversed(_BINARY.items()):
        if value and value % (1 << bits) == 0:
            return f"{value >> bits}{suffix}"
    return str(value)
