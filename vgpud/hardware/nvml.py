"""The only path to NVML: every call of vgpud passes `Nvml.call` or `Nvml.demand`.

Status codes are those of nvml.h, nvmlReturn_t.
"""

from collections import Counter
from types import ModuleType
from typing import Any

import structlog

from vgpud.hardware.workers import beat
from vgpud.model.errors import ErrorCode, VgpuError
from vgpud.model.log_event import LogEvent

log = structlog.get_logger(__name__)

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
IN_USE = 19
NO_DATA = 21
INSUFFICIENT_RESOURCES = 23
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
NOT_READY = 27
GPU_NOT_FOUND = 28
UNKNOWN = 999

# statuses of a question that the card, the driver or the current state has no answer to
_NO_ANSWER = frozenset(
    {
        INVALID_ARGUMENT,
        NOT_SUPPORTED,
        NO_PERMISSION,
        NOT_FOUND,
        FUNCTION_NOT_FOUND,
        CORRUPTED_INFOROM,
        NO_DATA,
        ARGUMENT_VERSION_MISMATCH,
        DEPRECATED,
        NOT_READY,
        UNKNOWN,
    }
)
_EXPECTED = frozenset({INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, NOT_FOUND})

_CODES: dict[int, tuple[ErrorCode, str, str]] = {
    LIBRARY_NOT_FOUND: (
        ErrorCode.NVML_MISSING,
        "the nvml library libnvidia-ml.so.1 is not on this node",
        "install the nvidia driver's user-space libraries (Debian: libnvidia-ml1)",
    ),
    DRIVER_NOT_LOADED: (
        ErrorCode.DRIVER_MISSING,
        "the nvidia kernel driver is not loaded",
        "load it with `modprobe nvidia`, and look in the kernel log if it will not",
    ),
    LIB_RM_VERSION_MISMATCH: (
        ErrorCode.NVML_FAILED,
        "the nvml library and the loaded nvidia kernel module are of different versions",
        "the driver was upgraded under the running kernel module: reload it, or reboot",
    ),
    GPU_IS_LOST: (
        ErrorCode.GPU_LOST,
        "the gpu has fallen off the bus or is not reachable",
        "look for Xid 79 in the kernel log; only a reset or a reboot brings it back",
    ),
    RESET_REQUIRED: (
        ErrorCode.RESET_NEEDED,
        "the gpu needs a reset before it can be used",
        "run `nvidia-smi --gpu-reset` when nothing uses it, or reboot",
    ),
    IN_USE: (
        ErrorCode.DEVICE_IN_USE,
        "the gpu is in use",
        "end what uses it, then try again",
    ),
    INSUFFICIENT_RESOURCES: (
        ErrorCode.NO_CAPACITY,
        "the gpu has no room for it at that place",
        "release what is there, or choose another place",
    ),
    NO_PERMISSION: (ErrorCode.NVML_FAILED, "the driver refuses it to this user", "run vgpud as root"),
    NOT_SUPPORTED: (ErrorCode.UNSUPPORTED, "this gpu does not support it", "choose another mode"),
    FUNCTION_NOT_FOUND: (
        ErrorCode.UNSUPPORTED,
        "this driver does not have it",
        "install a newer driver",
    ),
    TIMEOUT: (
        ErrorCode.NVML_TIMEOUT,
        "the driver gave up waiting for the gpu",
        "look for NVRM and Xid lines in the kernel log",
    ),
}


class NvmlRefusal(VgpuError):
    """NVML answered a call with `status`; `code` is the VgpuError that fits best."""

    status: int
    function: str

    def __init__(self, status: int, function: str, text: str = "") -> None:
        code, sentence, hint = _CODES.get(
            status,
            (ErrorCode.NVML_FAILED, f"nvml failed: {text or 'no text'}", "look in the kernel log"),
        )
        super().__init__(code, f"{sentence} ({function} answered {status})", hint)
        self.status = status
        self.function = function

    def about(self, uuid: str) -> "NvmlRefusal":
        """The same error with the device named in its sentence."""
        named = NvmlRefusal(self.status, self.function)
        named.code, named.hint = self.code, self.hint
        named.sentence = f"{uuid}: {self.sentence}"
        return named


class Nvml:
    """Wraps the binding: errors have numbers, bytes are decoded, and an unsupported call gives None.

    Thread-safe as NVML is. Not for use outside this room: it has no deadline of its own.
    """

    def __init__(self, binding: ModuleType) -> None:
        self.binding = binding
        self.refusals: Counter[int] = Counter()  # counts by status, without unsupported calls
        self._told: set[tuple[str, int]] = set()

    def call(self, name: str, *args: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """NVML's answer; None if card, driver or binding do not support the call, which is logged once.

        Raises NvmlRefusal for what makes the device or the library unusable.
        """
        try:
            return self.demand(name, *args)
        except NvmlRefusal as refusal:
            if refusal.status not in _NO_ANSWER:
                raise
            self._tell_once(refusal)
            return None

    def demand(self, name: str, *args: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """NVML's answer. Raises NvmlRefusal for every status but success."""
        function = getattr(self.binding, name, None)
        if function is None:
            raise NvmlRefusal(FUNCTION_NOT_FOUND, name)
        beat(name)
        try:
            value = function(*args)
        except self.binding.NVMLError as error:
            if error.value not in _EXPECTED and error.value != TIMEOUT:
                self.refusals[int(error.value)] += 1
            raise NvmlRefusal(error.value, name, str(error)) from None
        except UnicodeDecodeError:  # the binding decodes some texts itself, and raises for invalid UTF-8
            raise NvmlRefusal(UNKNOWN, name, "text that is not UTF-8") from None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def structure(self, name: str, *fields: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """A structure of the binding. Raises NvmlRefusal(FUNCTION_NOT_FOUND) if the binding lacks it."""
        kind = getattr(self.binding, name, None)
        if kind is None:
            raise NvmlRefusal(FUNCTION_NOT_FOUND, name)
        return kind(*fields)

    def constant(self, name: str, default: int) -> int:
        """A constant of the binding; older ones lack some."""
        return int(getattr(self.binding, name, default))

    @property
    def simulated(self) -> bool:
        """The simulated node's library exports its state's path; NVIDIA's does not."""
        return hasattr(getattr(self.binding, "nvmlLib", None), "vgpuSimStatePath")

    def _tell_once(self, refusal: NvmlRefusal) -> None:
        key = (refusal.function, refusal.status)
        if key in self._told:
            return
        self._told.add(key)
        if refusal.status in _EXPECTED:
            log.debug(LogEvent.NVML_CALL_UNSUPPORTED, function=refusal.function, status=refusal.status)
        else:
            log.warning(LogEvent.NVML_CALL_FAILED, function=refusal.function, status=refusal.status)
