"""Numbered errors: a table gives each error its gRPC status and its exit code.

Numbers are stable and never reused: 1xx bad input, 2xx policy and rights, 3xx not found or in conflict, 4xx
capacity, 5xx hardware and driver, 6xx helpers, 7xx storage, 8xx connections, 9xx bugs. Exit codes follow
nvidia-smi's manual page where the meaning is the same (2, 3, 4, 6, 9, 12, 15).
"""

from dataclasses import dataclass, field
from enum import Enum


class Exit(int, Enum):
    """Exit codes of vgpuctl and vgpud."""

    OK = 0
    DIFFERS = 1
    BAD_ARGUMENT = 2
    UNSUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_MISSING = 9
    NVML_MISSING = 12
    GPU_LOST = 15
    UNREACHABLE = 32
    NO_CAPACITY = 33
    DENIED = 34
    CONFLICT = 35
    TIMEOUT = 36
    DEGRADED = 37
    INTERNAL = 70
    CONFIG = 78


class ErrorCode(Enum):
    """Every error of vgpud, as (number, name of the gRPC status, exit code)."""

    BAD_QUANTITY = (101, "INVALID_ARGUMENT", Exit.BAD_ARGUMENT)
    BAD_PERCENT = (102, "INVALID_ARGUMENT", Exit.BAD_ARGUMENT)
    BAD_REQUEST = (103, "INVALID_ARGUMENT", Exit.BAD_ARGUMENT)
    BAD_POLICY = (104, "INVALID_ARGUMENT", Exit.CONFIG)
    BAD_REVISION = (105, "OUT_OF_RANGE", Exit.BAD_ARGUMENT)
    BAD_SETTING = (106, "INVALID_ARGUMENT", Exit.CONFIG)

    NOT_ALLOWED = (201, "PERMISSION_DENIED", Exit.NO_PERMISSION)
    NOT_OWNER = (202, "PERMISSION_DENIED", Exit.NO_PERMISSION)
    DENIED_BY_POLICY = (203, "FAILED_PRECONDITION", Exit.DENIED)
    OVER_QUOTA = (204, "RESOURCE_EXHAUSTED", Exit.DENIED)
    ACCOUNT_UNKNOWN = (205, "FAILED_PRECONDITION", Exit.DENIED)

    NO_SUCH_ALLOCATION = (301, "NOT_FOUND", Exit.NOT_FOUND)
    NO_SUCH_DEVICE = (302, "NOT_FOUND", Exit.NOT_FOUND)
    REQUEST_ID_REUSED = (303, "ALREADY_EXISTS", Exit.CONFLICT)
    ALLOCATION_BUSY = (304, "FAILED_PRECONDITION", Exit.CONFLICT)
    TENANT_ALIVE = (305, "FAILED_PRECONDITION", Exit.CONFLICT)
    NO_SUCH_CLIENT = (306, "NOT_FOUND", Exit.NOT_FOUND)

    NO_CAPACITY = (401, "RESOURCE_EXHAUSTED", Exit.NO_CAPACITY)
    IMPOSSIBLE = (402, "INVALID_ARGUMENT", Exit.NO_CAPACITY)
    UNSUPPORTED = (403, "UNIMPLEMENTED", Exit.UNSUPPORTED)

    NVML_MISSING = (501, "UNAVAILABLE", Exit.NVML_MISSING)
    DRIVER_MISSING = (502, "UNAVAILABLE", Exit.DRIVER_MISSING)
    NVML_FAILED = (503, "UNAVAILABLE", Exit.INTERNAL)
    NVML_TIMEOUT = (504, "DEADLINE_EXCEEDED", Exit.TIMEOUT)
    GPU_LOST = (505, "UNAVAILABLE", Exit.GPU_LOST)
    DEVICE_IN_USE = (506, "FAILED_PRECONDITION", Exit.CONFLICT)
    RESET_NEEDED = (507, "FAILED_PRECONDITION", Exit.CONFLICT)

    HELPER_FAILED = (601, "UNAVAILABLE", Exit.INTERNAL)
    HELPER_TIMEOUT = (602, "DEADLINE_EXCEEDED", Exit.TIMEOUT)
    LEASE_FAILED = (603, "UNAVAILABLE", Exit.INTERNAL)
    MPS_REFUSED = (604, "UNAVAILABLE", Exit.INTERNAL)
    CDI_FAILED = (605, "UNAVAILABLE", Exit.INTERNAL)
    SUSPEND_FAILED = (606, "FAILED_PRECONDITION", Exit.CONFLICT)

    LEDGER_FULL = (701, "UNAVAILABLE", Exit.INTERNAL)
    LEDGER_READ_ONLY = (702, "UNAVAILABLE", Exit.INTERNAL)
    LEDGER_CORRUPT = (703, "DATA_LOSS", Exit.CONFIG)
    LEDGER_NEWER = (704, "FAILED_PRECONDITION", Exit.CONFIG)
    LEDGER_LOCKED = (705, "FAILED_PRECONDITION", Exit.CONFLICT)
    LEDGER_FAILED = (706, "UNAVAILABLE", Exit.INTERNAL)

    UNREACHABLE = (801, "UNAVAILABLE", Exit.UNREACHABLE)
    DEADLINE = (802, "DEADLINE_EXCEEDED", Exit.TIMEOUT)
    STOPPING = (803, "UNAVAILABLE", Exit.UNREACHABLE)
    CLUSTER_REFUSED = (804, "UNAVAILABLE", Exit.UNREACHABLE)

    BUG = (901, "INTERNAL", Exit.INTERNAL)

    def __init__(self, number: int, status: str, exit_code: Exit) -> None:
        self.number = number
        self.status = status
        self.exit_code = exit_code


BY_NUMBER: dict[int, ErrorCode] = {code.number: code for code in ErrorCode}


_LONGEST_CHARACTERS = 1000  # maximum length of a sentence, because a sentence may quote a caller's text


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CHARACTERS else f"{text[:_LONGEST_CHARACTERS]}..."


# the class is not frozen, because the interpreter sets __traceback__ and __context__
@dataclass(unsafe_hash=True)
class VgpuError(Exception):
    """An error for an operator or user: what is wrong, with the figures, and one way to solve it.

    `sentence` and `hint` are lower case with no full stop. `details` has further lines (one for each device
    that was not chosen, one for each wrong key) for `-v` and machine output.
    """

    code: ErrorCode
    sentence: str
    hint: str
    details: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        self.sentence, self.hint = _cut(self.sentence), _cut(self.hint)
        super().__init__(self.code, self.sentence, self.hint, self.details)

    def __str__(self) -> str:
        return f"{self.sentence} (E{self.code.number})"
