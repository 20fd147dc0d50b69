"""NVML of a broken driver: any answer may be replaced by another status, figure or text."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

from tests.hardware.fakenvml import FakeNvml, process

# limits of the 32-bit and 64-bit figures in nvml.h
_FIGURES = (0, 1, 7, 8, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_TEXTS = ("", "x", "x" * 95, "../../etc", "\x00", "\x1b[2J\n", "MIG 99999g.9gb", "ü" * 40)
_STATUSES = (1, 2, 3, 6, 9, 10, 13, 15, 16, 18, 21, 23, 28, 999, 12345)
_OWN = "_tape"


class BrokenNvml(FakeNvml):
    """An NVML whose answers are wrong as the bytes of `tape` say. After the end of `tape` the answers are
    right.
    """

    def __init__(self, tape: bytes) -> None:
        super().__init__(2)
        self._tape = iter(tape)
        for gpu in self.gpus:
            gpu.mig = [1, 1]
            gpu.processes = [process(4242, instance=1, compute=0), process(4243)]
        self.inits = 1

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(value) or name == "nvmlMemory_v2":
            return value
        tape = super().__getattribute__(_OWN)
        return lambda *args: _answer(value, args, tape)


def _answer(function: Callable[..., Any], args: tuple[Any, ...], tape: Any) -> Any:
    kind = next(tape, 0)
    if kind >= 0xC0:
        raise pynvml.NVMLError(_STATUSES[kind % len(_STATUSES)])
    try:
        answer = function(*args)
    except (LookupError, StopIteration, TypeError, ValueError):
        # vgpud asks about a device or instance that a wrong answer has invented
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT) from None
    if kind < 0x40:
        return answer
    for given in args:
        if hasattr(given, "contents") and isinstance(getattr(given.contents, "value", None), int):
            # the argument is a count that the call returns by a pointer
            given.contents.value = _FIGURES[kind % len(_FIGURES)] % 2**32
    return _other(answer, kind)


def _other(answer: Any, kind: int) -> Any:
    match answer:
        case bool() | None:
            return answer
        case int():
            return _FIGURES[kind % len(_FIGURES)]
        case str() | bytes():
            return _TEXTS[kind % len(_TEXTS)]
        case list() | tuple():
            return type(answer)(_other(one, kind + at) for at, one in enumerate(answer))
        case SimpleNamespace():
            fields = enumerate(vars(answer).items())
            return SimpleNamespace(**{name: _other(value, kind + at) for at, (name, value) in fields})
    return answer
