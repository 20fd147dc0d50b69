"""Does a thread wait inside the driver? Told from what proc(5) shows of it; nothing is read here.

In a process whose memory the driver's checkpoint has taken out a call waits for a lock of the driver's, for
ever, and nobody is told. Seen on an H200 (driver 580.159.04, x86_64, glibc 2.39) in nine of nine such calls,
of plain programs and of libcublasLt in PyTorch: futex(FUTEX_WAIT_BITSET|PRIVATE|CLOCK_REALTIME) on the value
3 without a time, which is glibc's pthread_rwlock; the first return address on the stack lies in libc, the
next one, 48 or 64 bytes up, in libcuda. The driver's own threads wait for conditions (on 0) and in poll.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from struct import iter_unpack

_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; linux/futex.h
_FLAGS = 128 | 256  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
_PRIVATE = 128
#: What glibc's mutexes (2) and read-write locks (2, 3) wait on (nptl/lowlevellock.c, pthread_rwlock_common.c;
#: since 2.25). Its semaphores and, before 2.41, its condition variables wait on 0.
_LOCKS = (2, 3)
_NEAR_WORDS = 128  # libc's frames are small: a return address out of it that lies further up is none
_LIBC = re.compile(r"(libc|libpthread|ld)[-.]|ld-linux|\[v")
_DRIVERS_OWN = re.compile(
    r"cuda-EvtHandlr|cuda[0-9a-f]{10,}"
)  # the second is cut off by comm's 15 characters


class Owner(Enum):
    """Whose code an address lies in; C's library is with its loader, and with the kernel's pages."""

    LIBC = auto()
    DRIVER = auto()
    LIBVGPU = auto()
    OTHER = auto()


def _calls_x86(code: bytes) -> bool:
    """Intel's manual, CALL: E8 with a distance, or FF /2 with one of the forms of an address."""
    if code[-5:-4] == b"\xe8":
        return True
    return any(_indirect_bytes(code[-n:]) == n for n in (2, 3, 4, 6, 7) if len(code) >= n)


def _indirect_bytes(code: bytes) -> int:
    """Of the FF /2 that begins here; 0: it is none."""
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
    """Arm's manual, BL and BLR."""
    word = int.from_bytes(code[-4:], "little") if len(code) >= 4 else 0
    return word & 0xFC000000 == 0x94000000 or word & 0xFFFFFC1F == 0xD63F0000


@dataclass(frozen=True, slots=True)
class Machine:
    """`calls`: do these bytes, those before an address, end with a call? `address`: the bits of a stack's
    word that are one (Arm signs return addresses in the upper bits)."""

    futex: int
    calls: Callable[[bytes], bool]
    address: int


CALL_BYTES = 7  # the longest, on any of them
MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(202, _calls_x86, (1 << 64) - 1),
    "aarch64": Machine(98, _calls_arm, (1 << 48) - 1),
}


@dataclass(frozen=True, slots=True)
class Wait:
    """A thread that waits for a lock without a time: its stack pointer and program counter."""

    sp: int
    pc: int


def lock_wait(text: bytes, machine: Machine) -> Wait | None:
    """Of /proc/PID/task/TID/syscall; None: the thread does something else."""
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
    """Does a thread of the driver's own have this name (/proc/PID/task/TID/comm)?"""
    return _DRIVERS_OWN.fullmatch(name) is not None


def _owner(path: str) -> Owner:
    name = path.rpartition("/")[2]
    if name.startswith("libcuda.so"):
        return Owner.DRIVER
    if name.startswith("libvgpu.so"):
        return Owner.LIBVGPU
    return Owner.LIBC if _LIBC.match(name) else Owner.OTHER


class Code:
    """The executable mappings of a process: /proc/PID/maps, where a line that makes no sense is left out."""

    def __init__(self, maps: str) -> None:
        self._lines = [line for line in maps.splitlines() if "x" in line.partition(" ")[2][:4]]

    @cached_property
    def _mappings(self) -> tuple[list[int], list[tuple[int, Owner]]]:
        found = []
        for line in self._lines:
            place, _, rest = line.partition(" ")
            first, _, end = place.partition("-")
            words = rest.split(None, 4)
            try:
                found.append((int(first, 16), int(end, 16), _owner(words[4] if len(words) > 4 else "")))
            except ValueError:
                continue
        found.sort(key=lambda mapping: mapping[0])
        return [first for first, _, _ in found], [(end, owner) for _, end, owner in found]

    def owner(self, address: int) -> Owner | None:
        """None: no code lies there."""
        starts, rest = self._mappings
        place = bisect_right(starts, address) - 1
        return rest[place][1] if place >= 0 and address < rest[place][0] else None


def in_driver(wait: Wait, stack: bytes, code: Code, before: Callable[[int], bytes], machine: Machine) -> bool:
    """Has the driver been called, and waits inside C's library now?

    `stack` begins at the stack pointer; `before` gives the CALL_BYTES before an address, or fewer. The
    innermost return address outside of C's library must be the driver's. Further out somebody must have
    called it who is neither the driver nor libvgpu, whose own threads want nothing. A word that does not
    follow a call is no return address.
    """
    if code.owner(wait.pc) is not Owner.LIBC:
        return False
    called = False
    for place, (word,) in enumerate(iter_unpack("<Q", stack[: len(stack) // 8 * 8])):
        address = word & machine.address
        owner = code.owner(address)
        if owner is None or owner is Owner.LIBC or not machine.calls(before(address)):
            continue
        if not called:
            if owner is not Owner.DRIVER or place >= _NEAR_WORDS:
                return False
            called = True
        elif owner is Owner.OTHER:
            return True
    return False
