"""Memory of preload tenants through the daemon: resized limits, overcommitment, counters."""

import subprocess
import sys
import textwrap
from typing import Any

from tests.demo.node import DemoNode, Tenant
from tests.e2e.conftest import NodeMaker
from tests.e2e.support import GIB, MIB, PROBE, eventually, states
from tests.native.harness import LIBVGPU

CONTEXT = 526 * MIB  # bytes of a context on the simulated H200
ASKED = ["--isolation", "quota", "--device", "0"]

# For each input line "N" it allocates N MiB, and for "?" nothing. It prints the result, and the total and
# free MiB.
TALKS = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, free, total = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
for line in sys.stdin:
    result = 0
    if line.strip() != "?":
        result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(line) << 20))
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    print('{"said": [%d, %d, %d]}' % (result, total.value >> 20, free.value >> 20), flush=True)
"""


class Talker:
    """A tenant that allocates on request (TALKS), and its allocation."""

    def __init__(self, node: DemoNode, memory: str) -> None:
        before = states(node).keys()
        self.node = node
        words = [sys.executable, "-c", textwrap.dedent(TALKS)]
        self.tenant: Tenant = node.tenant([*ASKED, "--memory", memory], words)
        assert self.ask("?")[0] == 0
        (self.allocation,) = states(node).keys() - before

    def ask(self, word: str) -> list[int]:
        stdin = self.tenant.process.stdin
        assert stdin is not None
        stdin.write(word + "\n")
        stdin.flush()
        said: list[int] = self.tenant.line()["said"]
        return said

    def use(self) -> dict[str, Any]:
        (use,) = self.node.ctl_json("show", self.allocation)["use"]
        return dict(use)

    def row(self) -> dict[str, str]:
        """The slice as `vgpuctl show` prints it."""
        lines = self.node.ctl("show", self.allocation).stdout.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("DEVICE"))
        return dict(zip(lines[at].split(), lines[at + 1].split(), strict=False))

    def end(self) -> None:
        self.tenant.process.kill()
        self.tenant.end()
        eventually(lambda: self.allocation not in states(self.node), "it is released")


def test_a_resize_of_memory_takes_effect_in_a_running_tenant(make_node: NodeMaker) -> None:
    """A resize below the tenant's use ends no process. New memory is refused until the use is below the
    limit.
    """
    node = make_node()
    node.start()
    one = Talker(node, "4GiB")
    assert one.ask("2000") == [0, 4096, 4096 - 526 - 2000]
    node.ctl("resize", one.allocation, "--memory", "6GiB")
    assert one.ask("3000") == [0, 6144, 6144 - 526 - 5000]
    node.ctl("resize", one.allocation, "--memory", "2GiB")
    assert one.ask("?") == [0, 2048, 0]
    assert one.ask("1") == [2, 2048, 0]
    assert one.tenant.process.poll() is None
    assert int(one.use()["memoryUsedBytes"]) == CONTEXT + 5000 * MIB
    row = one.row()
    assert (row["MEMORY"], row["REFUSED"], row["CARD-FULL"]) == ("2GiB", "1", "0")
    assert row["USABLE"] == "1.5GiB"
    # another process of the lease has the same limit
    lease = {"LD_PRELOAD": str(LIBVGPU), "VGPU_LEASE": str(node.run_dir / "leases" / one.allocation)}
    words = [PROBE, "info"]
    second = subprocess.run(words, env=node.environment | lease, capture_output=True, text=True, check=False)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in second.stdout
    node.ctl("resize", one.allocation, "--memory", "8GiB")
    assert one.ask("2000")[0] == 0
    one.end()


OVERCOMMIT = """version = 1
[[device]]
mode = "preload"
preload.memory_overcommit = 1.5
"""


def test_an_overcommitted_tenant_gets_an_out_of_memory_error_when_the_card_is_full(
    make_node: NodeMaker,
) -> None:
    """The policy allows both limits, although their sum exceeds the device. The refusal of the second tenant
    is counted as "card full", and not as "limit reached".
    """
    node = make_node(profile="h200x1", policy=OVERCOMMIT)
    node.start()
    one, two = Talker(node, "100GiB"), Talker(node, "100GiB")
    refused = node.ctl("run", *ASKED, "--memory", "20GiB", "--", "true", check=False)
    assert refused.returncode != 0 and "does not fit" in refused.stderr
    assert one.ask(str(90 * 1024))[0] == 0
    assert two.ask(str(60 * 1024))[0] == 2
    free = two.ask("?")[2]
    # the program sees the device's free memory, which is less than what its limit leaves
    assert free < 52 * 1024
    use = two.use()
    assert (int(use.get("refusalsLimit", 0)), int(use["refusalsCard"])) == (0, 1)
    row = two.row()
    assert (row["REFUSED"], row["CARD-FULL"]) == ("0", "1")
    assert one.ask(str(20 * 1024))[0] == 2
    use = one.use()
    assert (int(use["refusalsLimit"]), int(use.get("refusalsCard", 0))) == (1, 0)
    one.end()
    assert two.ask(str(60 * 1024))[0] == 0
    assert int(two.use()["memoryUsedBytes"]) == CONTEXT + 60 * GIB
    two.end()
