"""Building blocks of the policy's tables: the base class, amounts of memory, times, and device matches."""

import re
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import MAX_BYTES, UNITS, check_bytes, format_bytes, parse_bytes


def wrong(sentence: str, hint: str) -> PydanticCustomError:
    """A validation error with a sentence and a hint; policy/words.py reads both from its context."""
    return PydanticCustomError("vgpud", "{sentence}", {"sentence": sentence, "hint": hint})


def _bytes(value: object) -> int:
    try:
        if isinstance(value, str):
            return parse_bytes(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return check_bytes(value)
    except VgpuError as error:
        raise wrong(error.sentence, error.hint) from None
    raise wrong(
        "an amount of memory is text with a unit, or a whole number of bytes", 'write it as in "4GiB"'
    )


MemoryBytes = Annotated[
    int,
    BeforeValidator(_bytes),
    PlainSerializer(format_bytes, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^ *[0-9]+(\.[0-9]+)? *({'|'.join(UNITS)}) *$"},
                {"type": "integer", "minimum": 1, "maximum": MAX_BYTES},
            ]
        }
    ),
]


_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = rf"^ *([0-9]{{1,9}}(?:\.[0-9]{{1,3}})?) *({'|'.join(_SECONDS)}) *$"


def _seconds(value: object) -> float:
    found = re.fullmatch(_TIME, value) if isinstance(value, str) else None
    if found is None:
        raise wrong("a time is text with a unit: ms, s, min, h or d", 'write it as in "10min"')
    return float(found[1]) * _SECONDS[found[2]]


def format_seconds(value: float) -> str:
    """The exact text of a time in the largest unit that divides it. The policy reads this text back."""
    ms = round(value * 1000)
    unit = next(name for name in reversed(_SECONDS) if ms % round(_SECONDS[name] * 1000) == 0)
    return f"{ms // round(_SECONDS[unit] * 1000)}{unit}"


def _in_bounds(value: float) -> float:
    if not _LEAST_SECONDS <= value <= _MOST_SECONDS:
        raise wrong(
            f"{format_seconds(value)} is out of bounds",
            f"from {format_seconds(_LEAST_SECONDS)} to {format_seconds(_MOST_SECONDS)}",
        )
    return value


# Bounds of a period: a shorter period would copy gigabytes too often, a longer one is surely a mistake.
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 30 * 86400.0

Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    AfterValidator(_in_bounds),
    PlainSerializer(format_seconds, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _TIME}),
]


MAX_INDEX = 255
_RANGE = re.compile(r"([0-9]{1,3})(?:-([0-9]{1,3}))?")


def _indices(value: object) -> tuple[int, ...]:
    """Parses device indices into a sorted tuple without repeats. `value` is a number, a text such as "0-3,6",
    or an array of these.
    """
    if isinstance(value, list | tuple):
        return tuple(sorted({index for part in value for index in _indices(part)}))
    if isinstance(value, str):
        return tuple(sorted({index for part in value.split(",") for index in _range(part.strip())}))
    if isinstance(value, bool) or not isinstance(value, int):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise wrong(f"{shown} is not an index", 'write 3, [0, 1] or "0-3,6"')
    if not 0 <= value <= MAX_INDEX:
        raise wrong(f"index {value} is out of bounds", f"from 0 to {MAX_INDEX}")
    return (value,)


def _range(text: str) -> range:
    found = _RANGE.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last or last > MAX_INDEX:
        raise wrong(f"{text!r} is not a range of indexes", f'write it as in "0-3,6", from 0 to {MAX_INDEX}')
    return range(first, last + 1)


def _shown_indices(value: tuple[int, ...]) -> int | list[int]:
    return value[0] if len(value) == 1 else list(value)


_ONE_INDEX = {"type": "integer", "minimum": 0, "maximum": MAX_INDEX}
_INDEX_TEXT = {"type": "string", "pattern": "^ *[0-9]{1,3}(-[0-9]{1,3})?( *, *[0-9]{1,3}(-[0-9]{1,3})?)* *$"}
Indices = Annotated[
    tuple[int, ...],
    BeforeValidator(_indices),
    PlainSerializer(_shown_indices, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                _ONE_INDEX,
                _INDEX_TEXT,
                {"type": "array", "minItems": 1, "items": {"anyOf": [_ONE_INDEX, _INDEX_TEXT]}},
            ]
        }
    ),
]


class PolicyTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Match(PolicyTable):
    """The match of a rule. All given keys must hold; an empty match covers every device."""

    uuid: str | None = Field(
        None, min_length=1, description="the device's NVML UUID, whole, as nvidia-smi -L prints it"
    )
    index: Indices | None = Field(
        None,
        min_length=1,
        description='NVML\'s index: a number, an array, or text with ranges such as "0-3,6"; a UUID is '
        "safer, because an index can change at a reboot",
    )
    name: str | None = Field(
        None, min_length=1, description='shell pattern on the product name, as in "NVIDIA H200*"; case counts'
    )
    memory_min: MemoryBytes | None = Field(None, description="the device's total memory is at least this")
    memory_max: MemoryBytes | None = Field(None, description="the device's total memory is at most this")
    mig_capable: bool | None = Field(None, description="whether MIG can partition the device")

    def covers(self, device: Device) -> bool:
        return all(
            (
                self.uuid is None or self.uuid == device.uuid,
                self.index is None or device.index in self.index,
                self.name is None or fnmatchcase(device.name, self.name),
                self.memory_min is None or device.memory_total_bytes >= self.memory_min,
                self.memory_max is None or device.memory_total_bytes <= self.memory_max,
                self.mig_capable is None or device.mig.capable == self.mig_capable,
            )
        )
