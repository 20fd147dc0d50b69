"""libvgpu's ioctl function answers a program's calls as the C library's does."""

import sys
from pathlib import Path

import pytest

from tests.native.harness import LIBVGPU, Tenant

# Prints the result and errno of calls with bad files and bad arguments. The requests are those that libvgpu
# notes (native/common/rm.h), others of their type, and some of the C library's own users.
CALLS = """
import ctypes, itertools, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
pages = ctypes.c_char.from_buffer(mmap.mmap(-1, 2 * page))
readable = ctypes.addressof(pages)
assert libc.mprotect(ctypes.c_void_p(readable + page), ctypes.c_size_t(page), 0) == 0
arguments = (0, 1, readable + page, readable + page - 8, readable + page - 12, 2**63, 2**64 - 8, readable)
files = (-1, 9999, os.open("/dev/null", os.O_RDWR), os.open("/", os.O_PATH), os.pipe()[0])
rm = [3 << 30 | size << 16 | ord("F") << 8 | number
      for number in (0x29, 0x2a, 0x2b, 0x2c) for size in (0, 16, 32, 48)]
FIONREAD, TCGETS = 0x541b, 0x5401
for file, request, argument in itertools.product(files, (*rm, FIONREAD, TCGETS), arguments):
    ctypes.set_errno(0)
    result = libc.ioctl(file, ctypes.c_ulong(request), ctypes.c_void_p(argument))
    print(file, hex(request), arguments.index(argument), result, ctypes.get_errno())
"""


@pytest.mark.parametrize("limited", [False, True])
def test_a_call_with_a_bad_file_or_a_bad_argument_has_the_result_that_it_has_without_libvgpu(
    lease: Path, limited: bool
) -> None:
    native = Tenant(None, ()).run(sys.executable, "-c", CALLS)
    noted = Tenant(lease if limited else None, (LIBVGPU,)).run(sys.executable, "-c", CALLS)
    assert (noted.returncode, noted.stderr) == (0, "")
    assert noted.stdout.splitlines() == native.stdout.splitlines()
    assert {line.split()[-1] for line in native.stdout.splitlines()} >= {"0", "9", "14", "25"}
