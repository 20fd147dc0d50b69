"""Which threads wait inside the driver, from texts of proc(5) and stacks recorded on an H200."""

import struct
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stacks.test_unwind import library
from vgpud.stacks.blocked import MACHINES, Code, Wait, in_driver, is_drivers_own, lock_wait

X86, ARM = MACHINES["x86_64"], MACHINES["aarch64"]
PROGRAM, CUBLAS, CUDA = 0x5555_5555_6000, 0x7F00_0100_0000, 0x7F00_0200_0000
VGPU, BLAS, LIBC, JIT = 0x7F00_0300_0000, 0x7F00_0400_0000, 0x7F00_0500_0000, 0x7F00_0600_0000
LIBC_FILE = LIBC - 0x28000
MAPS = f"""\
{PROGRAM:x}-{PROGRAM + 0x100000:x} r-xp 00001000 fe:00 1234    /opt/a program/bin/python3.12
{PROGRAM + 0x200000:x}-{PROGRAM + 0x300000:x} rw-p 00000000 00:00 0    [heap]
{CUBLAS:x}-{CUBLAS + 0x100000:x} r-xp 00001000 fe:00 1 /usr/lib/python3/nvidia/cublas/lib/libcublasLt.so.12
{CUDA:x}-{CUDA + 0x100000:x} r-xp 0012a000 fe:00 77 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
{CUDA + 0x100000:x}-{CUDA + 0x200000:x} r--p 0092a000 fe:00 77 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
{VGPU:x}-{VGPU + 0x100000:x} r-xp 00001000 fe:00 78 /usr/lib/vgpud/libvgpu.so
{BLAS:x}-{BLAS + 0x100000:x} r-xp 00001000 fe:00 79 /opt/numpy.libs/libscipy_openblas64_-56d6093b.so (deleted)
{LIBC_FILE:x}-{LIBC:x} r--p 00000000 fe:00 80 /usr/lib/x86_64-linux-gnu/libc.so.6
{LIBC:x}-{LIBC + 0x100000:x} r-xp 00028000 fe:00 80 /usr/lib/x86_64-linux-gnu/libc.so.6
{JIT:x}-{JIT + 0x1000:x} rwxp 00000000 00:00 0
not a mapping
"""
SP, PC = 0x7FFE_2000_0000, LIBC + 0x98D71
LOCKED = "202 0x5555557f4128 0x189 0x3 0x0 0x0 0xffffffff"
CALL = b"\x90\x90\xe8\x01\x02\x03\x04"
NO_CALL = b"\x90" * len(CALL)
FRAME = 48


@dataclass
class Stack:
    """A stack: words at their offsets. They are return addresses, and `stale` words that look like return
    addresses but follow no call.
    """

    frames: dict[int, int]
    stale: dict[int, int] = field(default_factory=dict)
    call: bytes = CALL
    libc: bytes = b""

    def memory(self, address: int, size: int) -> bytes:
        if SP <= address < SP + 4096:
            made = bytearray(4096)
            for offset, word in {**self.frames, **self.stale}.items():
                struct.pack_into("<Q", made, offset, word)
            return bytes(made[address - SP : address - SP + size])
        if self.libc and LIBC_FILE <= address < LIBC_FILE + len(self.libc):
            return self.libc[address - LIBC_FILE :][:size]
        return NO_CALL if address + len(CALL) in self.stale.values() else self.call


def line(words: str = LOCKED, sp: int = SP, pc: int = PC) -> bytes:
    return f"{words} {sp:#x} {pc:#x}\n".encode()


def blocked(stack: Stack, text: bytes = line()) -> bool:
    wait = lock_wait(text, X86)
    return wait is not None and in_driver(wait, Code(MAPS), stack.memory, X86)


PLAIN = Stack({0: LIBC + 0x9A8F1, FRAME: CUDA + 0x1B2C3, 120: CUDA + 0x3400, 400: PROGRAM + 0x11F0})
IN_CUBLAS = Stack(
    {0: LIBC + 0x9B2E5, 64: CUDA + 0x1B2C3, 300: CUDA + 0x88, 904: CUBLAS + 0x777, 992: PROGRAM}
)


@pytest.mark.parametrize(
    "stack",
    [
        pytest.param(PLAIN, id="a plain program"),
        pytest.param(IN_CUBLAS, id="libcublasLt"),
        pytest.param(Stack({0: LIBC + 9, FRAME: CUDA + 9, 200: JIT + 64}), id="code made at run time"),
        pytest.param(
            Stack({0: LIBC + 9, FRAME: CUDA + 9, 200: VGPU + 7, 800: PROGRAM + 5}), id="by way of libvgpu"
        ),
        pytest.param(
            Stack(PLAIN.frames, stale={8: CUBLAS + 5, 16: BLAS + 1, 24: CUDA + 0x150000}), id="stale words"
        ),
    ],
)
def test_a_thread_that_waits_inside_the_driver_is_found(stack: Stack) -> None:
    assert blocked(stack)


@pytest.mark.parametrize(
    "stack",
    [
        pytest.param(Stack({0: LIBC + 9, FRAME: BLAS + 5, 100: CUDA + 9, 200: PROGRAM + 5}), id="OpenBLAS"),
        pytest.param(Stack({0: LIBC + 9, FRAME: VGPU + 5, 100: CUDA + 9, 200: PROGRAM + 5}), id="libvgpu"),
        pytest.param(
            Stack({0: LIBC + 9, 72: PROGRAM + 5, 200: CUBLAS + 5}, stale={FRAME: CUDA + 0x1B2C3}),
            id="a stale word of the driver's",
        ),
        pytest.param(Stack({0: LIBC + 9, FRAME: CUDA + 9, 400: LIBC + 0x94AC3}), id="the driver's own"),
        pytest.param(
            Stack({0: LIBC + 9, FRAME: CUDA + 9, 200: VGPU + 7, 400: LIBC + 0x94AC3}), id="libvgpu's own"
        ),
        pytest.param(Stack({0: LIBC + 9, 1032: CUDA + 9, 1400: PROGRAM + 5}), id="far up"),
        pytest.param(Stack({0: LIBC + 9}), id="nobody"),
    ],
)
def test_a_thread_that_waits_elsewhere_is_not_found(stack: Stack) -> None:
    assert not blocked(stack)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("202 0x7f1 0x189 0x0 0x0 0x0 0xffffffff", id="a condition, a semaphore, cuda-EvtHandlr"),
        pytest.param("202 0x7f1 0x189 0x3 0x7ffe20000100 0x0 0xffffffff", id="with a time"),
        pytest.param("202 0x7f1 0x109 0x4c31 0x0 0x0 0xffffffff", id="pthread_join"),
        pytest.param("202 0x7f1 0x109 0x3 0x0 0x0 0xffffffff", id="shared between processes"),
        pytest.param("202 0x7f1 0x81 0x3 0x0 0x0 0x0", id="a wake"),
        pytest.param("7 0x7f1 0x2 0xffffffff 0x0 0x0 0x0", id="poll"),
        pytest.param("0 0x0 0x7f1 0x3 0x0 0x0 0x0", id="read"),
        pytest.param("230 0x1 0x0 0x7f1 0x0 0x0 0x0", id="sleep"),
        pytest.param("-1", id="no call"),
    ],
)
def test_a_wait_outside_the_driver_does_not_count(words: str) -> None:
    assert not blocked(PLAIN, line(words))


@pytest.mark.parametrize("text", [b"running\n", b"", b"202", b"202 0x1 0x189 0x3 0x0\n", b"\xff\xfe \0"])
def test_a_malformed_syscall_line_is_no_wait(text: bytes) -> None:
    assert lock_wait(text, X86) is None


def test_a_wait_whose_system_call_is_not_in_the_c_library_does_not_count() -> None:
    assert not blocked(PLAIN, line(pc=BLAS + 5))


def test_the_drivers_threads_are_recognised_by_name() -> None:
    assert all(map(is_drivers_own, ("cuda-EvtHandlr", "cuda00001400006", "cuda0000140000f")))
    assert not any(map(is_drivers_own, ("python3", "cuda-bench", "cudaMemtest", "cuda", "cuda2", "")))


def test_a_wait_for_a_mutex_of_the_driver_counts() -> None:
    assert blocked(PLAIN, line("202 0x5555557f4128 0x80 0x2 0x0 0x0 0x0"))


@pytest.mark.parametrize(
    "name",
    ["libc-2.31.so", "libpthread-2.31.so", "libpthread.so.0", "ld-linux-x86-64.so.2", "libc.so.6 (deleted)"],
)
def test_the_c_library_is_recognised_by_each_of_its_names(name: str) -> None:
    code = Code(MAPS.replace("libc.so.6", name))
    assert in_driver(Wait(SP, PC), code, PLAIN.memory, X86)


@pytest.mark.parametrize(
    "code",
    # GNU as encodes: call 1f; call *%rax; call *%r10; call *(%rax); call *8(%rax); call *8(%rsp); call
    # *0x1234(%rax); call *0x1234(%rsp); call *0x1234(%rip); call *(%rax,%rax,8); call *0x1234
    [
        "e804030201",
        "ffd0",
        "41ffd2",
        "ff10",
        "ff5008",
        "ff542408",
        "ff9034120000",
        "ff942434120000",
        "ff1534120000",
        "ff14c0",
        "ff142534120000",
    ],
)
def test_every_call_instruction_of_x86_is_known(code: str) -> None:
    found = bytes.fromhex(code)
    assert X86.calls(found.rjust(len(CALL), b"\x90"))
    assert not X86.calls((found + b"\x90").rjust(len(CALL), b"\x90")[-len(CALL) :])


@pytest.mark.parametrize("code", ["", "e8", "0102", "ffe0", "ff6008", "c3", "ffd090", "ff1534120000c3"])
def test_an_address_after_no_call_is_no_return_address(code: str) -> None:
    assert not X86.calls(bytes.fromhex(code))


@pytest.mark.parametrize(
    ("code", "calls"), [("00000094", 1), ("ffffffff", 0), ("00013fd6", 1), ("00011fd6", 0)]
)
def test_every_call_instruction_of_arm_is_known(code: str, calls: int) -> None:
    assert ARM.calls(bytes.fromhex(code)) == bool(calls)


def test_a_signed_return_address_on_arm_is_recognised() -> None:
    stack = Stack({8: LIBC + 8, 56: CUDA + 8 | 0x7B << 48, 200: PROGRAM + 8}, call=bytes.fromhex("00013fd6"))
    wait = lock_wait(line(LOCKED.replace("202", "98")), ARM)
    assert wait is not None
    assert in_driver(wait, Code(MAPS), stack.memory, ARM)
    assert lock_wait(line(), ARM) is None


# a waiting function, pthread_rwlock_rdlock, and a function directly behind a call that does not return
LIBRARY = library(
    {
        0x28000 + 0x98D00: (0x100, 8),
        0x28000 + 0x9A800: (0xF1, 48),
        0x28000 + 0x9A8F1: (0x100, 400),
    }
)


def test_the_c_librarys_frames_are_known_exactly() -> None:
    """The frames of the C library's functions are known exactly, so that the return address of a call that
    has ended is not taken for an active call.
    """
    stale = {24: CUDA + 0x1B2C3, 32: CUDA + 0x3400}
    frames = {0: LIBC + 0x9A8F1, 48: PROGRAM + 0x11F0, 120: PROGRAM + 0x99, 400: PROGRAM + 3}
    assert blocked(Stack({**frames, **stale}))  # without the C library's frames the thread counts as blocked
    assert not blocked(Stack({**frames, **stale}, libc=LIBRARY))
    assert blocked(Stack({**frames, 24: BLAS + 9, 48: CUDA + 0x3400}, libc=LIBRARY))
    assert not blocked(Stack({**frames, 24: CUDA + 9, 48: 12}, libc=LIBRARY))


WORDS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.builds(
        lambda base, offset: base + offset, st.sampled_from([CUDA, LIBC, PROGRAM]), st.integers(0, 2**21)
    ),
)


@given(st.binary(max_size=200), st.text(max_size=300), st.lists(WORDS, max_size=64), st.binary(max_size=9))
def test_damaged_memory_raises_no_error(text: bytes, maps: str, words: list[int], code: bytes) -> None:
    stack = struct.pack(f"<{len(words)}Q", *words) + code

    def memory(address: int, size: int) -> bytes:
        return stack[:size] if address == SP else code

    for machine in MACHINES.values():
        lock_wait(text, machine)
        lock_wait(b"202 " + text, machine)
        for known in (Code(maps), Code(MAPS), Code(f"{maps}\n1-2 r-xp {maps}")):
            in_driver(Wait(SP, PC), known, memory, machine)


@given(st.lists(WORDS.filter(lambda word: not CUDA <= word < CUDA + 0x100000), max_size=64))
def test_a_stack_without_driver_frames_is_no_wait_in_the_driver(words: list[int]) -> None:
    stack = Stack({8 * place: word for place, word in enumerate(words)})
    assert not in_driver(Wait(SP, PC), Code(MAPS), stack.memory, X86)
