"""What the tables of the policy are made of: the base of each, amounts of memory, and which devices."""

from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import MAX_BYTES, UNITS, check_bytes, format_bytes, parse_bytes


def wrong(sentence: str, hint: str) -> PydanticCustomError:
    """A validation error with our own words; policy/problems.py takes them out of its context."""
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


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Match(Table):
    """All keys that are given must hold; an empty match covers every device."""

    uuid: str | None = Field(
        None, min_length=1, description="the device's NVML UUID, whole, as nvidia-smi -L prints it"
    )
    index: int | None = Field(
        None, ge=0, description="NVML's index; a UUID is safer, for an index can change at a reboot"
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
                self.index is None or self.index == device.index,
                self.name is None or fnmatchcase(device.name, self.name),
                self.memory_min is None or device.memory_total_bytes >= self.memory_min,
                self.memory_max is None or device.memory_total_bytes <= self.memory_max,
                self.mig_capable is None or device.mig.capable == self.mig_capable,
            )
        )
