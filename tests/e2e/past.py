"""Test programs: a tenant whose driver calls bypass libvgpu, and a tenant whose threads wait for locks of
many kinds.
"""

import os
from functools import partial
from pathlib import Path

from vgpud.stacks.blocked import MACHINES, Code, lock_wait

#: For the input line "past" the program calls the driver's function by its address, as a program with the
#: driver's private table does. libvgpu does not see that call.
PAST = """
import ctypes as c, json, mmap, struct, sys
u = c.CDLL("libcuda.so.1")
def say(**words):
    sys.stdout.write(json.dumps(words) + "\\n")
    sys.stdout.flush()
def checked(code):
    if code: sys.exit(f"the driver answers {code}")
def address(wanted):  # the driver's file has it at its place in the symbol table
    for line in open("/proc/self/maps"):
        path = line.split(None, 5)[-1].strip()
        if path.rpartition("/")[2].startswith("libcuda.so."): break
    base = int(line.partition("-")[0], 16)
    with open(path, "rb") as file:
        image = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    table, = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQII", image, table + n * size) for n in range(count)]
    symbols = next(one for one in sections if one[1] == 11)
    names = sections[symbols[6]][4]
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", image, at)
        if image[names + name:names + name + len(wanted) + 1] == wanted + b"\\0":
            return base + value
context, memory = c.c_void_p(), c.c_uint64()
checked(u.cuInit(0))
checked(u.cuDevicePrimaryCtxRetain(c.byref(context), 0))
checked(u.cuCtxSetCurrent(context))
checked(u.cuMemAlloc_v2(c.byref(memory), c.c_size_t(4 << 20)))
past = c.CFUNCTYPE(c.c_int)(address(b"cuMemAlloc_v2"))
say(calls=["past"])
for line in sys.stdin:
    checked(past(c.byref(memory), c.c_size_t(4096)))
    say(done=line.strip())
"""


def frames_are_told(pid: int) -> bool:
    """True if the call frames of all threads that wait for a lock can be found. Without frames, stale words
    of the stack may be taken for return addresses.
    """
    machine = MACHINES[os.uname().machine]
    folder = Path(f"/proc/{pid}")
    code = Code((folder / "maps").read_text())
    found = [lock_wait((task / "syscall").read_bytes(), machine) for task in (folder / "task").iterdir()]
    memory = os.open(folder / "mem", os.O_RDONLY)
    try:
        read = partial(_read, memory)
        return all(code.frame(wait.pc, read, machine) is not None for wait in found if wait is not None)
    finally:
        os.close(memory)


def _read(memory: int, address: int, size: int) -> bytes:
    return os.pread(memory, size, address)
