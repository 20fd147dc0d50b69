"""Plans: ordered steps from what is to what shall be, as pure data.

Each step is idempotent, so that a plan cut anywhere by a crash can be run again or undone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.tenancy import MigMove, Mode


class StepKind(StrEnum):
    RECORD_INTENT = "record-intent"
    APPLY_MODE = "apply-mode"  # put a device into a mode (start its helper, enable MIG)
    CHOOSE_ENGINE = "choose-engine"  # what keeps the time slices of a device's preload tenants
    CLEAR_INSTANCE = "clear-instance"  # an idle MIG instance goes to make room
    ATTACH = "attach"  # make one slice real
    DETACH = "detach"
    WRITE_SPEC = "write-spec"  # the CDI file
    REMOVE_SPEC = "remove-spec"
    LOCK = "lock"  # the tenant's processes wait at their next CUDA call
    SAVE = "save"  # their device memory goes to the host
    RECORD_MOVE = "record-move"  # the other end of a move becomes the tenant's own
    RECORD_BACK = "record-back"  # its own device is the one that it came from again
    RESTORE = "restore"  # their memory comes to the devices of the slices
    UNLOCK = "unlock"
    COMMIT = "commit"
    UNAPPLY_MODE = "unapply-mode"
    FORGET = "forget"  # drop the allocation from the ledger


@dataclass(frozen=True, slots=True)
class Step:
    kind: StepKind
    reason: str
    device_uuid: str = ""
    mode: Mode | None = None
    slice_ordinal: int | None = None
    move: MigMove | None = None

    @property
    def fault_point(self) -> str:
        """The name under which tests cut a plan after this step."""
        suffix = "" if self.slice_ordinal is None else f"-{self.slice_ordinal}"
        return f"{self.kind.value}{suffix}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What an allocation or a release does: the intent is recorded, then the effects are made, then the
    outcome is recorded."""

    intent: Step
    effects: tuple[Step, ...]
    outcome: Step

    def __iter__(self) -> Iterator[Step]:
        return iter((self.intent, *self.effects, self.outcome))
