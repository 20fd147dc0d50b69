"""Tries on simulated nodes what each mode enforces on each driver branch, for the table of docs/modes.md.

`python -m tests.e2e.matrix` prints the table.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import simnode
from tests.demo.node import DemoNode
from tests.e2e.conftest import PreparedNode, end_daemon, end_helpers
from tests.e2e.cuda import cuda_program
from tests.e2e.support import GIB, MIB, PROBE, client, eventually, simulate, states
from tests.native.harness import static_program

BRANCHES = ("535", "550", "580", "595", "615")
MODES = {"preload": "quota", "mps": "compute", "mig": "hardware", "exclusive": "device"}
#: Allocates in steps of 64 MiB until the driver refuses, or until it has 32 GiB, and prints the sum in MiB.
GREEDY_TEXT = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
got = 0
while got < 32768 and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)) == 0:
    got += 64
print(json.dumps({"mib": got}), flush=True)
"""
GREEDY = [sys.executable, "-c", GREEDY_TEXT]
HOLD = [PROBE, "hold", "64MiB", "--then-wait-on-stdin"]
#: Two processes in a checkpoint job that share memory by CUDA IPC. The first writes a pattern to it. For a
#: line of input the second prints whether it reads the pattern.
SHARING_TEXT = cuda_program("""
import os
# as `cuda-checkpoint --launch-job` does, whose file has a content
os.environ["CUDA_CHECKPOINT_JOB_FILE"] = f"/proc/self/fd/{os.memfd_create('job', 0)}"
given, gives = os.pipe()
second = os.fork() == 0
class Handle(c.Structure): _fields_ = [("bytes", c.c_char * 64)]
memory, handle = c.c_uint64(), Handle()
begin()
if second:
    handle = Handle.from_buffer_copy(os.read(given, 64))
    call("cuIpcOpenMemHandle_v2", c.byref(memory), handle, 1)
    say(shares=True)
    sys.stdin.readline()
    back = (c.c_uint32 * 16)()
    call("cuMemcpyDtoH_v2", back, memory, c.c_size_t(64))
    say(whole=all(word == 0x5eed for word in back))
else:
    call("cuMemAlloc_v2", c.byref(memory), c.c_size_t(1 << 16))
    call("cuMemsetD32_v2", memory, c.c_uint(0x5eed), c.c_size_t(1 << 14))
    call("cuIpcGetMemHandle", c.byref(handle), memory)
    os.write(gives, bytes(handle))
    os.wait()
""")
SHARING = [sys.executable, "-c", SHARING_TEXT]


def options(mode: str) -> list[str]:
    size = [] if mode == "exclusive" else ["--memory", "16GiB"]
    return ["--isolation", MODES[mode], *size, "--device", "0"]


def stripped(node: DemoNode) -> list[str]:
    names = ("VGPU_SIM_STATE", "LD_LIBRARY_PATH")
    return ["env", "-i", *(f"{name}={node.environment[name]}" for name in names)]


def keeps_memory(node: DemoNode, mode: str, program: list[str]) -> bool:
    """Returns whether the mode gives a program that wants 32 GiB no more than the 16 GiB of its slice."""
    tenant = node.tenant(options(mode), program)
    got = int(tenant.line()["mib"])
    tenant.end()
    eventually(lambda: not states(node), "its allocation ends with it")
    assert got > 0
    return got * MIB <= 16 * GIB


@contextmanager
def holding(node: DemoNode) -> Iterator[str]:
    """Starts a preload tenant, yields the id of its allocation, and kills the tenant afterwards, because a
    suspended tenant would not end.
    """
    tenant = node.tenant(options("preload"), HOLD)
    tenant.line()
    with client(node) as calls:
        (held,) = calls.list_allocations().allocations
    yield held.id
    tenant.process.kill()
    tenant.process.wait()
    eventually(lambda: not states(node), "its allocation ends with it")


def does(node: DemoNode, *verb: str) -> bool:
    """Returns whether vgpud can carry out this verb of vgpuctl for a preload tenant."""
    with holding(node) as name:
        return node.ctl(verb[0], name, *verb[1:], check=False).returncode == 0


def suspends_sharing(node: DemoNode) -> bool:
    """Returns whether two processes that share memory can be suspended, and share the memory after their
    resumption.
    """
    tenant = node.tenant(options("preload"), SHARING)
    tenant.line()
    (name,) = states(node)
    suspended = node.ctl("suspend", name, "--deep", check=False).returncode == 0
    if suspended:
        node.ctl("resume", name)
    _, said = tenant.end()
    eventually(lambda: not states(node), "its allocation ends with it")
    return suspended and json.loads(said) == {"whole": True}


def shows(node: DemoNode, fault: str) -> bool:
    """Returns whether vgpud shows the repair that NVML requests for a device with this fault."""
    simulate(node, "fault", fault, "--device", "0", "--code", "1")
    try:
        with client(node) as calls:
            uuid = calls.list_devices().devices[0].uuid
            calls.drain_device(uuid, undrain=True)  # makes vgpud take a new snapshot of the devices
            return bool(calls.list_devices().devices[0].health_reason)
    finally:
        simulate(node, "fault", "clear")


Trial = Callable[[DemoNode], bool]
PROMISES: dict[tuple[str, str], Trial] = {
    ("preload", "memory limit of a program with libvgpu"): lambda n: keeps_memory(n, "preload", GREEDY),
    ("preload", "memory limit of a program past libvgpu (`env -i`)"): (
        lambda n: keeps_memory(n, "preload", [*stripped(n), *GREEDY])
    ),
    ("preload", "memory limit of a static program with `ioctl` calls of its own"): (
        lambda n: keeps_memory(n, "preload", [str(static_program("bare-static")), "0", "32768"])
    ),
    ("preload", "`suspend --deep`: no memory left on the device"): lambda n: does(n, "suspend", "--deep"),
    ("preload", "`suspend --deep` of processes that share memory by CUDA IPC (in a job)"): suspends_sharing,
    ("preload", "`move` to another device"): lambda n: does(n, "move", "--to", "1"),
    ("mps", "memory limit of a client"): lambda n: keeps_memory(n, "mps", GREEDY),
    ("mps", "memory limit of a program past the guard (`env -i`)"): (
        lambda n: keeps_memory(n, "mps", [*stripped(n), *GREEDY])
    ),
    ("mig", "memory limit"): lambda n: keeps_memory(n, "mig", GREEDY),
    ("all", "a card that asks for a reset is closed (`sick`)"): lambda n: shows(n, "recovery"),
    ("all", "rows that wait to be remapped are told"): lambda n: shows(n, "rows-pending"),
    ("all", "banks that wait to be remapped are told"): lambda n: shows(n, "banks-pending"),
}


def column(branch: str, folder: Path) -> list[bool]:
    """Whether each of PROMISES is kept on this driver branch, in the order of PROMISES."""
    inside = simnode.create(folder / branch, "h200x8", driver=branch).environment(os.environ)
    node = PreparedNode(environment=inside)
    try:
        node.start()
        return [trial(node) for trial in PROMISES.values()]
    finally:
        end_daemon(node)
        end_helpers(node)
        node.remove()


def table(columns: dict[str, list[bool]]) -> str:
    lines = [f"| mode | promise | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for at, (mode, promise) in enumerate(PROMISES):
        marks = ("yes" if answers[at] else "no" for answers in columns.values())
        lines.append(f"| {mode} | {promise} | {' | '.join(marks)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(table({branch: column(branch, Path(scratch)) for branch in BRANCHES}))
