"""Computes a function's frame size on another process's stack from the call frame information of its library.

The information is mapped in the process: the ELF header, .eh_frame_hdr and .eh_frame (Linux Standard Base,
core, 10.6; DWARF 5, 6.4). Only the forms that C compilers produce are supported. Only the stack pointer and
the return address are tracked: if a frame depends on another register, the answer is None.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

# A function that reads memory: (address, size) -> that many bytes, or fewer if some cannot be read.
Memory = Callable[[int, int], bytes]

_EH_FRAME_HEADER = 0x6474E550  # value of PT_GNU_EH_FRAME
# encodings of .eh_frame_hdr: a sorted table of signed 32-bit words, relative to the header
_HEADER = bytes((1, 0x1B, 0x03, 0x3B))
_RELATIVE = 0x1B  # the encoding DW_EH_PE_pcrel | DW_EH_PE_sdata4
_POINTER_BYTES = {0x0: 8, 0x2: 2, 0x3: 4, 0x4: 8, 0xA: 2, 0xB: 4, 0xC: 8}
_MOST_HEADERS = 64
_MOST_BYTES = 4096  # maximum size of an entry


class _UnknownError(Exception):
    """Raised for a form that this module does not support."""


class _Reader:
    """Reads values from bytes; raises _UnknownError at their end."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 0

    def take(self, size: int) -> bytes:
        taken = self.content[self.place : self.place + size]
        if len(taken) < size:
            raise _UnknownError
        self.place += size
        return taken

    def word(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.word(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    @property
    def is_done(self) -> bool:
        return self.place >= len(self.content)


def _read(memory: Memory, address: int, size: int) -> _Reader:
    return _Reader(memory(address, size))


def _frame_header(base: int, memory: Memory) -> int:
    elf = _read(memory, base, 64)
    if elf.take(6) != b"\x7fELF\x02\x01":  # an ELF file with 64 bits, little endian
        raise _UnknownError
    elf.place = 32
    first = elf.word(8)
    elf.place = 54
    size, count = elf.word(2), elf.word(2)
    for number in range(min(count, _MOST_HEADERS)):
        header = _read(memory, base + first + number * size, 24)
        if header.word(4) == _EH_FRAME_HEADER:
            header.place = 16
            return base + header.word(8)
    raise _UnknownError


def _entry(pc: int, base: int, memory: Memory) -> int:
    """The address of the frame description for the function at `pc`. Raises _UnknownError if there is
    none.
    """
    header = _frame_header(base, memory)
    start = _read(memory, header, 12)
    if start.take(4) != _HEADER:
        raise _UnknownError
    start.take(4)
    low, high = 0, start.word(4)
    while high - low > 1:
        middle = (low + high) // 2
        begins = header + _read(memory, header + 12 + 8 * middle, 4).word(4, signed=True)
        low, high = (middle, high) if begins <= pc else (low, middle)
    return header + _read(memory, header + 16 + 8 * low, 4).word(4, signed=True)


def _body(address: int, memory: Memory) -> _Reader:
    """The content of an entry, without its length field."""
    size = _read(memory, address, 4).word(4)
    if not 4 <= size <= _MOST_BYTES:
        raise _UnknownError
    body = _read(memory, address + 4, size)
    if len(body.content) < size:
        raise _UnknownError
    return body


@dataclass(frozen=True, slots=True)
class _Common:
    """The part of a frame description that a group of functions shares."""

    code_unit: int
    data_unit: int
    program: _Reader


def _common(address: int, memory: Memory) -> _Common:
    body = _body(address, memory)
    body.take(4)
    if body.word(1) != 1:
        raise _UnknownError
    end = body.content.find(b"\0", body.place)
    letters = body.take(max(end - body.place, 0)).decode("latin-1")
    body.take(1)
    code_unit, data_unit = body.leb(), body.leb(signed=True)
    body.take(1)
    # the letter S marks a signal's frame, which is not supported
    if not letters.startswith("z") or set(letters) - set("zPLRB"):
        raise _UnknownError
    size = body.leb()
    rest = body.place + size
    for letter in letters[1:]:
        if letter == "P":
            body.take(_POINTER_BYTES.get(body.word(1) & 0xF, _MOST_BYTES))
        elif letter == "L":
            body.take(1)
        elif letter == "R" and body.word(1) != _RELATIVE:
            raise _UnknownError
    return _Common(code_unit, data_unit, _Reader(body.content[rest:]))


@dataclass(frozen=True, slots=True)
class _Row:
    """Where a frame ends: at a register plus `offset`. The return address is relative to that end."""

    register: int = -1
    offset: int = 0
    saved: int | None = None


@dataclass
class _Table:
    """Executes the call frame program of a function up to `pc`."""

    common: _Common
    returns: int  # DWARF's number of the register with the return address
    at: int
    pc: int
    row: _Row = _Row()
    first: _Row = _Row()

    def follow(self, program: _Reader) -> None:
        kept: list[_Row] = []
        while not program.is_done:
            byte = program.word(1)
            high, low = byte & 0xC0, byte & 0x3F
            if high == 0x40:
                self.at += low * self.common.code_unit
            elif high == 0x80:
                self._save(low, program.leb() * self.common.data_unit)
            elif high == 0xC0:
                self._save_again(low)
            elif low in (0x02, 0x03, 0x04):
                self.at += program.word(1 << low - 2) * self.common.code_unit
            elif low == 0x0A:
                kept.append(self.row)
            elif low == 0x0B and kept:
                self.row = kept.pop()
            else:
                self._other(low, program)
            if self.at > self.pc:
                return

    def _save(self, register: int, offset: int | None) -> None:
        if register == self.returns:
            self.row = replace(self.row, saved=offset)

    def _save_again(self, register: int) -> None:
        self._save(register, self.first.saved)

    def _other(self, code: int, program: _Reader) -> None:
        unit = self.common.data_unit
        match code:
            case 0x00 | 0x2D:  # DW_CFA_nop, or the start or end of signed return addresses
                pass
            case 0x05:
                self._save(program.leb(), program.leb() * unit)
            case 0x11:
                self._save(program.leb(), program.leb(signed=True) * unit)
            case 0x06:
                self._save_again(program.leb())
            case 0x07 | 0x08:
                self._save(program.leb(), None)
            case 0x0C:
                self.row = replace(self.row, register=program.leb(), offset=program.leb())
            case 0x0D:
                self.row = replace(self.row, register=program.leb())
            case 0x0E:
                self.row = replace(self.row, offset=program.leb())
            case 0x2E:  # DW_CFA_GNU_args_size: the size of the arguments, which is not needed
                program.leb()
            case _:
                raise _UnknownError


@dataclass(frozen=True, slots=True)
class Registers:
    """DWARF's numbers of the stack pointer and of the return address, on one architecture."""

    stack: int
    returns: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame on the stack. It ends `bytes` above the stack pointer, where the caller's frame begins. The
    return address is at offset `returns` from there.
    """

    bytes: int
    returns: int


def frame(pc: int, base: int, memory: Memory, registers: Registers) -> Frame | None:
    """The frame of the function at `pc`, in a library that is mapped at `base`; None if it cannot be
    determined.
    """
    try:
        entry = _entry(pc, base, memory)
        body = _body(entry, memory)
        common = _common(entry + 4 - body.word(4), memory)
        begins = entry + 8 + body.word(4, signed=True)
        if not begins <= pc < begins + body.word(4):
            return None
        body.take(body.leb())
        table = _Table(common, registers.returns, begins, pc)
        table.follow(common.program)
        table.first = table.row
        table.follow(body)
    except _UnknownError:
        return None
    row = table.row
    if row.register != registers.stack or row.saved is None or row.offset <= 0:
        return None
    return Frame(row.offset, row.saved)
