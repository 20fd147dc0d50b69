"""The typed policy: what an administrator allows on each device.

Quantities are written as in "4GiB"; every key is checked, unknown ones are refused. The values
here are plain data: nothing in this room looks at a device except `Match.covers`.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vgpud.model.device import Device
from vgpud.model.errors import VgpuError
from vgpud.model.quantity import check_bytes, parse_bytes
from vgpud.model.tenancy import Mode


def _bytes(value: object) -> int:
    try:
        if isinstance(value, str):
            return parse_bytes(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return check_bytes(value)
    except VgpuError as error:
        raise ValueError(f"{error.sentence}; {error.hint}") from None
    raise ValueError('an amount of memory is text such as "4GiB", or a whole number of bytes')


MemoryBytes = Annotated[int, BeforeValidator(_bytes)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Match(_Table):
    """All keys that are given must hold; an empty match covers every device."""

    uuid: str | None = Field(None, description="a device's NVML UUID, whole")
    index: int | None = Field(None, ge=0, description="NVML index; UUIDs are safer, an index can change")
    name: str | None = Field(None, description='shell pattern on the product name, "NVIDIA H200*"')
    memory_min: MemoryBytes | None = Field(None, description="total memory at least")
    memory_max: MemoryBytes | None = Field(None, description="total memory at most")
    mig_capable: bool | None = Field(None, description="can the device be partitioned by MIG")

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


class PreloadSettings(_Table):
    max_tenants: int = Field(64, ge=1, le=1024, description="allocations on one device at one time")


class MpsSettings(_Table):
    max_tenants: int = Field(16, ge=1, le=60, description="allocations on one device at one time")
    overcommit_percent: float = Field(
        100.0, ge=100.0, le=1000.0, description="the sum of the active thread percentages allowed"
    )


class MigSettings(_Table):
    profiles: tuple[str, ...] | None = Field(
        None, description="GPU instance profiles that may be made, by name; all if left out"
    )
    change_mode: bool = Field(True, description="may MIG mode be switched on an idle device")


class ExclusiveSettings(_Table):
    pass


ModeOrAuto = Literal["auto", "mig", "mps", "preload", "exclusive", "unmanaged"]


class DeviceRule(_Table):
    """One [[device]] table; the first rule whose match covers a device gives its mode."""

    match: Match = Field(default_factory=Match)
    mode: ModeOrAuto = "auto"
    preload: PreloadSettings | None = None
    mps: MpsSettings | None = None
    mig: MigSettings | None = None
    exclusive: ExclusiveSettings | None = None

    def settings_preload(self) -> PreloadSettings:
        return self.preload or PreloadSettings()

    def settings_mps(self) -> MpsSettings:
        return self.mps or MpsSettings()

    def settings_mig(self) -> MigSettings:
        return self.mig or MigSettings()

    def allows(self, mode: Mode) -> bool:
        return self.mode in ("auto", mode.value)


class PlannerSettings(_Table):
    strategy: Literal["pack", "spread"] = Field(
        "pack", description="pack fills the fullest device that fits, spread takes the emptiest"
    )


class Policy(_Table):
    version: Literal[1] = 1
    planner: PlannerSettings = Field(default_factory=PlannerSettings)
    device: tuple[DeviceRule, ...] = ()

    def rule_for(self, device: Device) -> DeviceRule:
        """The first rule that covers the device; without one, mode "auto"."""
        return next((rule for rule in self.device if rule.match.covers(device)), DeviceRule())
