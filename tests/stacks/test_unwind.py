"""Call frames of the C library's functions, compared with binutils' reading of the same library."""

import os
import platform
import random
import re
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conditions import unmet
from vgpud.stacks.blocked import MACHINES
from vgpud.stacks.unwind import Frame, Registers, frame

X86 = Registers(stack=7, returns=16)
BASE = 0x7F00_0000_0000
HEADER, COMMON = 0x1000, 0x2000
DRAWN = 400


def _block(content: bytes) -> bytes:
    padded = content + bytes(-len(content) % 4)
    return struct.pack("<I", len(padded)) + padded


def library(
    functions: Mapping[int, tuple[int, int]], letters: bytes = b"zR\0", rest: bytes = b"\x01\x1b"
) -> bytes:
    """An x86-64 library that contains only call-frame data: start of each function -> (its length, its
    frame's bytes).
    """
    image = bytearray(0x4000)
    image[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", image, 32, 64)
    struct.pack_into("<HH", image, 54, 56, 2)
    struct.pack_into("<IIQQ", image, 64 + 56, 0x6474E550, 4, HEADER, HEADER)
    # CFA is rsp + 8, with the return address 8 below it
    common = struct.pack("<IB", 0, 1) + letters + b"\x01\x78\x10" + rest + b"\x0c\x07\x08\x90\x01"
    entries, table = bytearray(_block(common)), b""
    for begins, (size, frame_bytes) in sorted(functions.items()):
        at = COMMON + len(entries)
        # frame change after the first byte of code
        program = b"\x41\x0e" + bytes((frame_bytes & 0x7F | 0x80, frame_bytes >> 7))
        body = struct.pack("<IiIB", at + 4 - COMMON, begins - at - 8, size, 0) + program
        entries += _block(body)
        table += struct.pack("<ii", begins - HEADER, at - HEADER)
    header = b"\x01\x1b\x03\x3b" + struct.pack("<iI", COMMON - HEADER - 4, len(functions)) + table
    image[HEADER : HEADER + len(header)] = header
    image[COMMON : COMMON + len(entries)] = entries
    return bytes(image)


def found(image: bytes, pc: int) -> Frame | None:
    def memory(address: int, size: int) -> bytes:
        start = address - BASE
        return image[start : start + size] if start >= 0 else b""

    return frame(BASE + pc, BASE, memory, X86)


TWO = {0x30000: (0x40, 48), 0x30050: (0x10, 400)}


@pytest.mark.parametrize(
    ("pc", "size"),
    [
        (0x30000, 8),
        (0x30001, 48),
        (0x3003F, 48),
        (0x30040, None),
        (0x3004F, None),
        (0x30051, 400),
        (0x2F, None),
    ],
)
def test_the_unwind_row_of_an_address_is_found(pc: int, size: int | None) -> None:
    assert found(library(TWO), pc) == (None if size is None else Frame(size, -8))


def test_a_library_without_call_frame_information_has_no_rows() -> None:
    assert found(library({}), 0x30000) is None
    assert found(bytes(0x4000), 0x30000) is None


@pytest.mark.parametrize(
    ("letters", "rest", "is_read"),
    [
        (b"zPLR\0", b"\x07\x9b\0\0\0\0\x1b\x1b", True),
        (b"zRS\0", b"\x01\x1b", False),  # flags of a signal frame
        (b"zR\0", b"\x01\x00", False),  # an encoding with absolute addresses
        (b"\0", b"", False),
    ],
)
def test_each_kind_of_frame_entry_is_read(letters: bytes, rest: bytes, is_read: bool) -> None:
    assert (found(library(TWO, letters, rest), 0x30010) is not None) == is_read


@given(st.integers(0, 0x3FFF), st.binary(min_size=1, max_size=40), st.sampled_from([0, 1, 0x10, 0x51]))
def test_damaged_frames_raise_no_error(place: int, garbage: bytes, offset: int) -> None:
    image = bytearray(library(TWO))
    for start in (place, HEADER + place % 64, COMMON + place % 128):
        image[start : start + len(garbage)] = garbage
        found(bytes(image), 0x30000 + offset)


def rows(path: Path) -> list[tuple[int, str, str]]:
    """Rows of `readelf --debug-dump=frames-interp`: place, CFA, and the rule of the return address."""
    words = ["readelf", "--debug-dump=frames-interp", str(path)]
    # readelf fails if a library's debug file is missing, but prints everything
    text = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300).stdout
    made = []
    for block in text.split("\n\n"):
        if not re.search(r" FDE cie=", block):
            continue
        lines = [line.split() for line in block.splitlines()[1:]]
        for place, cfa, *rules in lines[1:]:
            made.append((int(place, 16), cfa, rules[-1] if lines[0][-1] == "ra" else "u"))
    return made


def test_a_real_library_is_read_as_binutils_reads_it() -> None:
    machine = MACHINES.get(platform.machine())
    if machine is None:
        unmet("frames", platform.machine())
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        (w[0], w[5]) for w in maps if len(w) == 6 and re.search(r"/libc[-.][^/]*$", w[5]) and w[2] == "0" * 8
    ]
    base, path = int(mapped[0][0].partition("-")[0], 16), Path(mapped[0][1])
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    drawn = random.Random(7).sample(rows(path), DRAWN)
    told = missed = 0
    try:
        for place, cfa, returns in drawn:
            known = re.fullmatch(r"c-(\d+)", returns)
            direct = re.fullmatch(r"(?:rsp|sp)\+(\d+)", cfa)
            there = frame(base + place, base, lambda at, size: os.pread(memory, size, at), machine.registers)
            if there is not None:
                assert known is not None and direct is not None
                assert there == Frame(int(direct[1]), -int(known[1]))
                told += 1
            elif known and direct:
                missed += 1  # the unwinder knows the function, but does not read one of its frame's forms
    finally:
        os.close(memory)
    assert told > 20 * missed
