"""The orders `reach` and `copy` of vgpu-suspend, for processes whose lists of parked memory are wrong."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simnode import BUILD, SimNode
from vgpud.proc import start_ticks

ASKED = 0xFFFFFFFF
# Prints descriptors of files, of which some are lists of parked memory. The list "good" copies a block of 7s
# over a block of 1s.
PROGRAM = """
import ctypes as c, fcntl, json, os, struct, sys, tempfile
u = c.CDLL("libcuda.so.1")
class Prop(c.Structure):
    _fields_ = [*((name, c.c_int) for name in ("type", "handles", "at", "id")), ("rest", c.c_uint64 * 2)]
class Access(c.Structure):
    _fields_ = [("at", c.c_int), ("id", c.c_int), ("flags", c.c_int)]
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
size, context = 4 << 20, c.c_void_p()
call("cuInit", 0); call("cuDevicePrimaryCtxRetain", c.byref(context), 0); call("cuCtxSetCurrent", context)
def block(value):
    handle, base, fd = c.c_uint64(), c.c_uint64(), c.c_int()
    prop, access = Prop(1, 1, 1, 0), Access(1, 0, 3)
    call("cuMemCreate", c.byref(handle), c.c_size_t(size), c.byref(prop), c.c_ulonglong(0))
    zero = c.c_uint64(0)
    call("cuMemAddressReserve", c.byref(base), c.c_size_t(size), zero, zero, zero)
    call("cuMemMap", base, c.c_size_t(size), c.c_size_t(0), handle, c.c_ulonglong(0))
    call("cuMemSetAccess", base, c.c_size_t(size), c.byref(access), c.c_size_t(1))
    call("cuMemsetD8_v2", base, c.c_ubyte(value), c.c_size_t(size))
    call("cuMemExportToShareableHandle", c.byref(fd), handle, 1, c.c_ulonglong(0))
    return fd.value, base
(source, _), (target, base) = block(7), block(1)
def made(magic=0x4b505056, count=1, result=0xffffffff, start=source, end=target, bytes=size, seals=2 | 4):
    fd = os.memfd_create("list", os.MFD_ALLOW_SEALING) if seals is not None else on_disk.fileno()
    os.write(fd, struct.pack("<4IiiQ", magic, count, result, 0, start, end, bytes))
    if seals: fcntl.fcntl(fd, 1033, seals)
    return fd
pipe, _ = os.pipe()
on_disk = tempfile.TemporaryFile(dir="/var/tmp")
lists = {
    "good": made(), "no file": 900, "no list": pipe, "standard input": 0, "not sealed": made(seals=0),
    "on a disk": made(seals=None),
    "sealed against growth": made(seals=4), "magic": made(magic=1), "answered": made(result=0),
    "too many": made(count=4097), "shorter than it says": made(count=2), "no memory": made(start=pipe),
    "no descriptor": made(end=900), "negative": made(start=-1), "too large": made(bytes=8 << 20),
    "not in pages": made(bytes=12345), "nothing": made(bytes=0), "huge": made(bytes=1 << 63),
    **{f"good {i}": made() for i in range(6)},
}
print(json.dumps(lists), flush=True)
for line in sys.stdin:
    back = (c.c_ubyte * size)()
    call("cuMemcpyDtoH_v2", back, base, c.c_size_t(size))
    result, copied = struct.unpack("<4I", os.pread(lists["good"], 16, 0))[2:]
    held = bytes(back)
    values = [held[0]] if held == held[:1] * size else sorted(set(held))
    print(json.dumps([values, result, copied]), flush=True)
"""
NO_LIST = [
    "no file", "no list", "standard input", "not sealed", "on a disk", "sealed against growth", "magic",
    "answered", "too many", "shorter than it says",
]  # fmt: skip
BAD_LIST = ["no memory", "no descriptor", "negative", "too large", "not in pages", "nothing", "huge"]


# of a copy, in their order
DRIVER_CALLS = (
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemcpyDtoDAsync_v2",
    "cuEventRecord",
)


class Helper:
    """A running vgpu-suspend, and a program whose parked memory it should copy."""

    def __init__(self, node: SimNode, folder: Path) -> None:
        self.node = node
        self.uuids = [device["uuid"] for device in node.dump()["devices"]]
        self.helper = node.start([str(BUILD / "bin" / "vgpu-suspend"), str(folder / "lock"), "1"])
        self.program = node.start([sys.executable, "-c", PROGRAM])
        assert self._line(self.helper) == "ready"
        self.lists: dict[str, int] = json.loads(self._line(self.program))

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def order(self, verb: str, *more: object) -> str:
        """The name of the order's result."""
        pid = self.program.pid
        assert self.helper.stdin is not None
        self.helper.stdin.write(" ".join(map(str, (verb, pid, start_ticks(pid), *more))) + "\n")
        self.helper.stdin.flush()
        return self._line(self.helper).split()[1]

    def seen(self) -> tuple[list[int], int, int]:
        """The bytes of the destination block, and the fields result and copied of the list "good"."""
        assert self.program.stdin is not None
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        held, result, copied = json.loads(self._line(self.program))
        return held, result, copied


@pytest.fixture
def helper(sim_node: Callable[..., SimNode], tmp_path: Path) -> Helper:
    return Helper(sim_node("h200x8"), tmp_path)


def test_a_list_of_parked_memory_is_copied_only_once(helper: Helper) -> None:
    good = helper.lists["good"]
    assert helper.order("copy", good) == "CUDA_ERROR_NOT_FOUND", "nothing is prepared"
    assert helper.order("reach", *helper.uuids[:2]) == "CUDA_SUCCESS"
    assert helper.seen() == ([1], ASKED, 0)
    assert helper.order("copy", good) == "CUDA_SUCCESS"
    assert helper.seen() == ([7], 0, 1)
    assert helper.order("copy", good) == "CUDA_ERROR_NOT_FOUND", "the list has its answer"


def test_a_file_that_is_no_list_of_parked_memory_is_left_unchanged(helper: Helper) -> None:
    helper.order("reach", *helper.uuids[:2])
    for name in NO_LIST:
        assert helper.order("copy", helper.lists[name]) == "CUDA_ERROR_NOT_FOUND", name
        assert helper.seen() == ([1], ASKED, 0), name


def test_a_list_that_names_memory_that_does_not_exist_is_refused_and_changes_nothing(helper: Helper) -> None:
    helper.order("reach", *helper.uuids[:2])
    refused = {name: helper.order("copy", helper.lists[name]) for name in BAD_LIST}
    assert not set(refused.values()) & {"CUDA_SUCCESS", "CUDA_ERROR_NOT_FOUND", "ENDED"}, refused
    assert helper.seen() == ([1], ASKED, 0)
    assert helper.order("copy", helper.lists["good"]) == "CUDA_SUCCESS"
    assert helper.seen() == ([7], 0, 1)


def test_a_copy_between_devices_that_do_not_reach_each_other_is_refused(helper: Helper) -> None:
    helper.node.sim("fault", "fail", "--function", "cuDeviceCanAccessPeer", "--count", "1")
    assert helper.order("reach", *helper.uuids[:2]) != "CUDA_SUCCESS"
    assert helper.order("reach", helper.uuids[0], f"GPU-{'0' * 32}") == "CUDA_ERROR_NOT_SUPPORTED"
    assert helper.order("reach", *helper.uuids[:2]) == "CUDA_SUCCESS"
    assert helper.order("reach", *helper.uuids[:2]) == "CUDA_SUCCESS"
    assert helper.order("reach", *helper.uuids[1:3]) == "CUDA_ERROR_INVALID_VALUE", "one pair a helper"


def test_a_failure_to_make_contexts_fails_each_later_copy_of_parked_memory(helper: Helper) -> None:
    helper.node.sim("fault", "fail", "--function", "cuDevicePrimaryCtxRetain", "--code", "2", "--count", "1")
    assert helper.order("reach", *helper.uuids[:2]) == "CUDA_SUCCESS"
    for _ in range(2):
        assert helper.order("copy", helper.lists["good"]) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert helper.seen() == ([1], ASKED, 0)


def test_vgpu_suspend_locks_its_tenant_alone(helper: Helper, tmp_path: Path) -> None:
    """vgpu-suspend locks one byte of the lock file, that of its tenant. So two of them can work for two
    tenants at the same time, and a second one for the same tenant waits for the first.
    """
    with (tmp_path / "lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2)
        with pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    helper.helper.kill()
    helper.helper.wait()
    with (tmp_path / "lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)


def test_vgpu_suspend_refuses_an_order_that_it_cannot_read_and_goes_on(helper: Helper) -> None:
    pid, ticks = helper.program.pid, start_ticks(helper.program.pid)
    invalid = ["", "state", f"state x {ticks}", f"state 0 {ticks}", f"state {pid} -1", f"state {pid} 1x"]
    for words in (
        "dance",
        "state 1",
        "lock",
        "lock long",
        "copy",
        "copy -1",
        "reach GPU-0",
        "reach GPU-0 GPU-1",
        f"restore {helper.uuids[0]}",
        "restore GPU-0 GPU-1",
        " ".join(("restore", *helper.uuids * 32)),
    ):
        verb, _, rest = words.partition(" ")
        invalid.append(f"{verb} {pid} {ticks} {rest}")
    assert helper.helper.stdin is not None
    for order in invalid:
        helper.helper.stdin.write(f"{order}\n")
        helper.helper.stdin.flush()
        assert helper._line(helper.helper).split()[1] == "CUDA_ERROR_INVALID_VALUE", order
    assert helper.order("state") == "CUDA_SUCCESS"


def test_a_process_that_the_pid_does_not_name_has_ended(helper: Helper) -> None:
    assert helper.helper.stdin is not None
    for pid, ticks in ((helper.program.pid, 1), (threading.get_native_id(), 1), (1 << 30, 1)):
        helper.helper.stdin.write(f"state {pid} {ticks}\n")
        helper.helper.stdin.flush()
        assert helper._line(helper.helper) == "-1 ENDED -1"


def test_vgpu_suspend_reports_why_it_does_not_start(sim_node: Callable[..., SimNode], tmp_path: Path) -> None:
    node, program = sim_node("h200x1"), str(BUILD / "bin" / "vgpu-suspend")
    for words in ([], ["lock"], ["lock", "one"], ["lock", "-1"], ["lock", "1", "2"]):
        done = node.run([program, *words], check=False)
        assert done.returncode == 2 and done.stderr.startswith("usage: "), words
    done = node.run([program, str(tmp_path / "no" / "lock"), "1"], check=False)
    assert (done.returncode, done.stdout.split(":")[0]) == (1, "error the lock file cannot be taken")
    done = node.run([program, str(tmp_path / "lock"), "1"], {"LD_LIBRARY_PATH": "/nothing"}, check=False)
    assert done.returncode == 1 and done.stdout.startswith("error "), done.stdout


def test_a_copy_that_fails_leaves_no_memory_of_the_process_mapped(helper: Helper) -> None:
    mappings = Path(f"/proc/{helper.helper.pid}/maps")
    helper.order("reach", *helper.uuids[:2])
    assert helper.order("copy", helper.lists["no memory"]) == "CUDA_ERROR_INVALID_VALUE"
    before = mappings.read_text().splitlines()
    assert helper.order("copy", helper.lists["no descriptor"]) == "CUDA_ERROR_INVALID_VALUE"
    assert mappings.read_text().splitlines() == before
    for i, call in enumerate(DRIVER_CALLS):
        helper.node.sim("fault", "fail", "--function", call, "--code", "2", "--count", "1")
        assert helper.order("copy", helper.lists[f"good {i}"]) == "CUDA_ERROR_OUT_OF_MEMORY", call
        assert mappings.read_text().splitlines() == before, call
        assert helper.seen() == ([1], ASKED, 0), call
    assert helper.order("copy", helper.lists["good"]) == "CUDA_SUCCESS"
    assert helper.seen() == ([7], 0, 1)
