"""Calls NVML: every call of vgpud passes `Nvml.call` or `Nvml.demand`.

The status codes are those of nvml.h, nvmlReturn_t.
"""

from collections import Counter
from types import ModuleType
from typing import Any

import structlog

from vgpud.hardware.fatal import FatalEvents
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

# NVML statuses which mean that the card, the driver or the current state has no answer to the question
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
        "the NVML library libnvidia-ml.so.1 is not on this node",
        "install the NVIDIA driver's user-space libraries (Debian: libnvidia-ml1)",
    ),
    DRIVER_NOT_LOADED: (
        ErrorCode.DRIVER_MISSING,
        "the NVIDIA kernel driver is not loaded",
        "load it with `modprobe nvidia`, and look in the kernel log if it will not",
    ),
    LIB_RM_VERSION_MISMATCH: (
        ErrorCode.NVML_FAILED,
        "the NVML library and the loaded NVIDIA kernel module are of different versions",
        "the driver was upgraded under the running kernel module: reload it, or reboot",
    ),
    GPU_IS_LOST: (
        ErrorCode.GPU_LOST,
        "the GPU has fallen off the bus or is not reachable",
        "look for Xid 79 in the kernel log; only a reset or a reboot brings it back",
    ),
    RESET_REQUIRED: (
        ErrorCode.RESET_NEEDED,
        "the GPU needs a reset before it can be used",
        "run `nvidia-smi --gpu-reset` when nothing uses it, or reboot",
    ),
    IN_USE: (
        ErrorCode.DEVICE_IN_USE,
        "the GPU is in use",
        "end what uses it, then try again",
    ),
    INSUFFICIENT_RESOURCES: (
        ErrorCode.NO_CAPACITY,
        "the GPU has no room for it at that place",
        "release what is there, or choose another place",
    ),
    NO_PERMISSION: (ErrorCode.NVML_FAILED, "the driver refuses it to this user", "run vgpud as root"),
    NOT_SUPPORTED: (ErrorCode.UNSUPPORTED, "this GPU does not support it", "choose another mode"),
    FUNCTION_NOT_FOUND: (
        ErrorCode.UNSUPPORTED,
        "this driver does not have it",
        "install a newer driver",
    ),
    TIMEOUT: (
        ErrorCode.NVML_TIMEOUT,
        "the driver gave up waiting for the GPU",
        "look for NVRM and Xid lines in the kernel log",
    ),
}


class NvmlRefusal(VgpuError):
    """NVML answered a call with an error. `status` is NVML's number, `code` is the VgpuError code that fits
    best.
    """

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
        """Returns the same error with the device named in its sentence."""
        named = NvmlRefusal(self.status, self.function)
        named.code, named.hint = self.code, self.hint
        named.sentence = f"{uuid}: {self.sentence}"
        return named


class Nvml:
    """Wraps the NVML binding: errors get numbers, bytes are decoded, and an unsupported call returns None.

    Thread-safe, as NVML is. The calls have no deadline of their own, so they are made only in a worker of
    `Gateway` or in the thread that watches events.
    """

    def __init__(self, binding: ModuleType, fatal: FatalEvents | None = None) -> None:
        self.binding = binding
        # number of error answers by NVML status, without TIMEOUT and the expected ones (_EXPECTED)
        self.refusals: Counter[int] = Counter()
        self.fatal = fatal or FatalEvents()
        self._told: set[tuple[str, int]] = set()

    def call(self, name: str, *args: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """Makes an NVML call. Returns None, logged once, if NVML has no answer (_NO_ANSWER), for example
        because the card does not support the call.

        Raises NvmlRefusal for any other error.
        """
        try:
            return self.demand(name, *args)
        except NvmlRefusal as refusal:
            if refusal.status not in _NO_ANSWER:
                raise
            self._tell_once(refusal)
            return None

    def demand(self, name: str, *args: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """Makes an NVML call. Raises NvmlRefusal for every status other than success."""
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
        except UnicodeDecodeError:  # the binding itself decodes some texts, and raises this for invalid UTF-8
            raise NvmlRefusal(UNKNOWN, name, "text that is not UTF-8") from None
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def structure(self, name: str, *fields: object) -> Any:  # noqa: ANN401  # the binding is untyped
        """Makes a structure of the NVML binding. Raises NvmlRefusal(FUNCTION_NOT_FOUND) if the binding lacks
        the structure.
        """
        kind = getattr(self.binding, name, None)
        if kind is None:
            raise NvmlRefusal(FUNCTION_NOT_FOUND, name)
        return kind(*fields)

    def constant(self, name: str, default: int) -> int:
        """The value of a constant in the NVML binding, or `default`, because older bindings lack some
        constants.
        """
        return int(getattr(self.binding, name, default))

    @property
    def simulated(self) -> bool:
        """Is this the simulated node's library? It exports the path of its state; NVIDIA's library
        does not.
        """
        return hasattr(getattr(self.binding, "nvmlLib", None), "vgpuSimStatePath")

    def _tell_once(self, refusal: NvmlRefusal) -> None:
        """Logs an error of NVML, once for each function and status. It is logged as debug, not as a warning,
        if the status is an expected one (_EXPECTED).
        """
        key = (refusal.function, refusal.status)
        if key in self._told:
            return
        self._told.add(key)
        if refusal.status in _EXPECTED:
            log.debug(LogEvent.NVML_CALL_FAILED_AS_EXPECTED, function=refusal.function, status=refusal.status)
        else:
            log.warning(
                LogEvent.NVML_CALL_FAILED,
                function=refusal.function,
                status=refusal.status,
                why=refusal.sentence,
            )
