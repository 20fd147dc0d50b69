"""Decides from a thread's files in /proc whether it waits inside the driver. Reads no file itself.

In a process that the driver's checkpoint has saved, a driver call waits for a lock forever, without any
notification. Seen on an H200 (driver 580.159.04, x86_64, glibc 2.39) in nine of nine such calls, of plain
programs and of libcublasLt in PyTorch: futex(FUTEX_WAIT_BITSET|PRIVATE|CLOCK_REALTIME) on the value 3 without
a timeout, which is glibc's pthread_rwlock. The first return address on the stack is in libc, the next one, 48
or 64 bytes up, in libcuda. The driver's own threads wait for conditions (on 0) and in poll.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from struct import iter_unpack
from typing import NamedTuple

from vgpud.stacks.unwind import Frame, Memory, Registers, frame

_WAITS = (0, 9)  # operations FUTEX_WAIT and FUTEX_WAIT_BITSET of linux/futex.h
_FLAGS = 128 | 256  # flags FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME of linux/futex.h
_PRIVATE = 128
#: The futex values of glibc's mutexes (2) and read-write locks (2, 3) (nptl/lowlevellock.c,
#: pthread_rwlock_common.c; since 2.25). Its semaphores and, before 2.41, its condition variables wait on 0.
_LOCKS = (2, 3)
_STACK_BYTES = 64 << 10  # bytes of the stack to read, up to the caller of the driver
# The frames of libc are small, so a candidate further up the stack is not a return address of libc.
_NEAR_BYTES = 1024
_MOST_FRAMES = 16
_LIBC = re.compile(r"(libc|libpthread|ld)[-.]|ld-linux|\[v")
_DRIVERS_OWN = re.compile(
    r"cuda-EvtHandlr|cuda[0-9a-f]{10,}"
)  # comm has 15 characters, so the second name is truncated


class Owner(Enum):
    """What the code at an address belongs to. The C library includes its loader and the kernel's pages."""

    LIBC = auto()
    DRIVER = auto()
    LIBVGPU = auto()
    OTHER = auto()


def _calls_x86(code: bytes) -> bool:
    """Does the code end with a call? Intel's manual, CALL: E8 with a distance, or FF /2 with an address."""
    if code[-5:-4] == b"\xe8":
        return True
    return any(_indirect_bytes(code[-n:]) == n for n in (2, 3, 4, 6, 7) if len(code) >= n)


def _indirect_bytes(code: bytes) -> int:
    """The length of an FF /2 instruction that begins here; 0 if there is none."""
    kind, register, rest = code[1] >> 6, code[1] >> 3 & 7, code[1] & 7
    if code[0] != 0xFF or register != 2:
        return 0
    if kind == 3:
        return 2
    scaled = rest == 4
    far = kind == 2 or (kind == 0 and rest == 5)
    far = far or (kind == 0 and scaled and len(code) > 2 and code[2] & 7 == 5)
    return 2 + scaled + (4 if far else kind)


def _calls_arm(code: bytes) -> bool:
    """True if the code ends with a call: BL or BLR of Arm's manual."""
    word = int.from_bytes(code[-4:], "little") if len(code) >= 4 else 0
    return word & 0xFC000000 == 0x94000000 or word & 0xFFFFFC1F == 0xD63F0000


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a processor architecture. `calls`: does this code, which ends before a return address,
    end with a call? `address`: the mask of address bits in a word of the stack (Arm signs return addresses in
    the upper bits).
    """

    futex: int
    calls: Callable[[bytes], bool]
    address: int
    registers: Registers


_CALL_BYTES = 7  # the longest call instruction of all architectures
MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(202, _calls_x86, (1 << 64) - 1, Registers(stack=7, returns=16)),
    "aarch64": Machine(98, _calls_arm, (1 << 48) - 1, Registers(stack=31, returns=30)),
}


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits for a lock without a timeout: its stack pointer and program counter."""

    sp: int
    pc: int


def lock_wait(text: bytes, machine: Machine) -> Wait | None:
    """Parses /proc/PID/task/TID/syscall; None if the thread does not wait for a lock."""
    try:
        number, *words = text.split()
        if int(number) != machine.futex:
            return None
        _futex, operation, value, time, _, _, sp, pc = (int(word, 16) for word in words)
    except ValueError:
        return None
    waits = operation & ~_FLAGS in _WAITS and operation & _PRIVATE and value in _LOCKS and time == 0
    return Wait(sp, pc) if waits else None


def is_drivers_own(name: str) -> bool:
    """True for the name (/proc/PID/task/TID/comm) of a thread that the driver itself started."""
    return _DRIVERS_OWN.fullmatch(name) is not None


def _owner(path: str) -> Owner:
    name = path.rpartition("/")[2]
    if name.startswith("libcuda.so"):
        return Owner.DRIVER
    if name.startswith("libvgpu.so"):
        return Owner.LIBVGPU
    return Owner.LIBC if _LIBC.match(name) else Owner.OTHER


class _Mapping(NamedTuple):
    start: int
    end: int
    owner: Owner
    base: int  # address at which the beginning of the file is mapped


class Code:
    """The executable mappings of a process, from /proc/PID/maps. Invalid lines are left out."""

    def __init__(self, maps: str) -> None:
        bases: dict[str, int] = {}
        self._mappings: list[_Mapping] = []
        for line in maps.splitlines():
            place, _, rest = line.partition(" ")
            start, _, end = place.partition("-")
            words = rest.split(None, 4)
            path = words[4] if len(words) > 4 else ""
            try:
                if int(words[1], 16) == 0:
                    bases[path] = int(start, 16)
                if "x" in words[0]:
                    known = bases.get(path, 0) if path else 0
                    self._mappings.append(_Mapping(int(start, 16), int(end, 16), _owner(path), known))
            except (IndexError, ValueError):
                continue
        self._mappings.sort()
        self._starts = [mapping.start for mapping in self._mappings]
        self._frames: dict[int, Frame | None] = {}

    def owner(self, address: int) -> Owner | None:
        """What the code at the address belongs to; None if there is no code."""
        found = self._find(address)
        return None if found is None else found.owner

    def frame(self, pc: int, memory: Memory, machine: Machine) -> Frame | None:
        """The frame of the function at `pc`; None if it cannot be determined."""
        if pc not in self._frames:
            found = self._find(pc)
            base = 0 if found is None else found.base
            self._frames[pc] = frame(pc, base, memory, machine.registers) if base else None
        return self._frames[pc]

    def _find(self, address: int) -> _Mapping | None:
        place = bisect_right(self._starts, address) - 1
        found = self._mappings[place] if place >= 0 else None
        return found if found is not None and address < found.end else None


def in_driver(wait: Wait, code: Code, memory: Memory, machine: Machine) -> bool:
    """Does the thread wait in the C library, called by the driver?

    The innermost return address outside of the C library must be the driver's. A frame further out must
    belong to other code than the driver and libvgpu, whose internal threads do not count as the tenant's
    work.
    """
    if code.owner(wait.pc) is not Owner.LIBC:
        return False
    out = _out_of_libc(wait, code, memory, machine)
    if out is None:  # without frame information, the first plausible return address counts as the innermost
        owner, sp = next(_returns(wait.sp, _NEAR_BYTES, code, memory, machine), (None, 0))
    else:
        owner, sp = code.owner(out.pc), out.sp
    if owner is not Owner.DRIVER:
        return False
    further = (owner for owner, _ in _returns(sp, _STACK_BYTES, code, memory, machine))
    return any(owner is Owner.OTHER for owner in further)


def _out_of_libc(wait: Wait, code: Code, memory: Memory, machine: Machine) -> Wait | None:
    """The first frame outside of the C library; None if it cannot be determined."""
    pc, sp = wait.pc, wait.sp
    for _ in range(_MOST_FRAMES):
        found = code.frame(pc, memory, machine)
        if found is None:
            return None
        sp += found.bytes
        word = memory(sp + found.returns, 8)
        returns = int.from_bytes(word, "little") & machine.address
        if code.owner(returns) is not Owner.LIBC:
            return Wait(sp, returns)
        # minus 1, so that the address is inside the call instruction: the next instruction may belong to
        # another function
        pc = returns - 1
    return None


def _returns(
    start: int, size: int, code: Code, memory: Memory, machine: Machine
) -> Iterator[tuple[Owner, int]]:
    """The words on the stack that may be return addresses outside of the C library, the innermost first: what
    the code belongs to, and where the stack continues. Words that do not follow a call are left out; words of
    calls that have ended may be included.
    """
    stack = memory(start, size)
    for place, (word,) in enumerate(iter_unpack("<Q", stack[: len(stack) // 8 * 8])):
        address = word & machine.address
        owner = code.owner(address)
        if owner is None or owner is Owner.LIBC:
            continue
        if machine.calls(memory(address - _CALL_BYTES, _CALL_BYTES)):
            yield owner, start + 8 * place + 8
