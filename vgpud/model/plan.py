"""Plans: the ordered steps from the current to the desired state, as pure data.

Each step is idempotent, so that a plan can be run again or undone after a crash.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vgpud.model.tenancy import MigMove, Mode


class StepKind(StrEnum):
    RECORD_INTENT = "record-intent"
    APPLY_MODE = "apply-mode"  # put a device into a mode (start its helper, enable MIG)
    # decide which engine enforces the time slices of a device's preload tenants
    CHOOSE_ENGINE = "choose-engine"
    CLEAR_INSTANCE = "clear-instance"  # remove an idle MIG instance to make room
    ATTACH = "attach"  # create one slice on its device
    DETACH = "detach"
    WRITE_SPEC = "write-spec"  # write the allocation's CDI file
    REMOVE_SPEC = "remove-spec"
    LOCK = "lock"  # make the tenant's processes wait at their next CUDA call
    SAVE = "save"  # copy the device memory of the tenant's processes to the host
    RECORD_MOVE = "record-move"  # the target device of the move becomes the slice's device
    RECORD_BACK = "record-back"  # the source device of the move becomes the slice's device again
    RESTORE = "restore"  # copy the memory of the tenant's processes to the devices of the slices
    UNLOCK = "unlock"
    COMMIT = "commit"
    COMMIT_SUSPENDED = "commit-suspended"  # record that the tenant has the allocation, and starts suspended
    UNAPPLY_MODE = "unapply-mode"
    FORGET = "forget"  # delete the allocation from the ledger


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
        """The name of the point after this step, at which tests end the daemon."""
        suffix = "" if self.slice_ordinal is None else f"-{self.slice_ordinal}"
        return f"{self.kind.value}{suffix}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that make or release an allocation: record the intent, make the effects, record the
    outcome.
    """

    intent: Step
    effects: tuple[Step, ...]
    outcome: Step

    def __iter__(self) -> Iterator[Step]:
        return iter((self.intent, *self.effects, self.outcome))
