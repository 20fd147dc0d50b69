"""Every form of a kernel launch, and the two kinds of default stream."""

# ruff: noqa: E501 - the snippets are programs; broken lines read worse

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.test_cuda import ask
from tests.simnode import SimNode

Make = Callable[..., SimNode]

NOT_READY, TOO_LARGE = 600, 720

HEAD = """
class Config(c.Structure): _fields_ = [("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("shared", c.c_uint), ("stream", c.c_void_p), ("attributes", c.c_void_p), ("count", c.c_uint)]
cu.init(); cu.context()
f = cu.function()
def plain(name, stream=None):
    return code(name, f, 1, 1, 1, 32, 1, 1, 0, stream, None, None)
def extended(name, x=1):
    return code(name, c.byref(Config((c.c_uint * 3)(x, 1, 1), (c.c_uint * 3)(32, 1, 1))), f, None, None)
def together(name, x=1):
    return code(name, f, x, 1, 1, 1024, 1, 1, 0, None, None)
"""


@pytest.fixture
def node(sim_node: Make) -> SimNode:
    return sim_node("h200x1")


def test_every_form_of_a_kernel_launch_occupies_the_device(node: SimNode) -> None:
    out = ask(
        node,
        HEAD
        + """
import subprocess
cu.kernel_us(1000)
calls = [(plain, "cuLaunchKernel"), (extended, "cuLaunchKernelEx"), (together, "cuLaunchCooperativeKernel")]
out = [launch(name + form) for launch, name in calls for form in ("", "_ptsz")]
out += [extended("cuLaunchKernelEx", 0), code("cuLaunchKernelEx", None, f, None, None), together("cuLaunchCooperativeKernel", 132 * 2), together("cuLaunchCooperativeKernel", 132 * 2 + 1)]
cu("cuCtxSynchronize")
simctl = os.path.join(os.environ["PATH"].split(":")[0], "vgpu-simctl")
dump = json.loads(subprocess.run([simctl, os.environ["VGPU_SIM_STATE"], "dump"], capture_output=True, check=True).stdout)
out.append(dump["processes"][0]["uses"][0]["done_ns"])
""",
    )
    assert out == [*[0] * 6, 1, 1, 0, TOO_LARGE, 7e6]


def test_each_thread_has_its_own_default_stream(node: SimNode) -> None:
    """The legacy default stream waits for every stream of the process. A thread's own default stream waits
    only for itself.
    """
    out = ask(
        node,
        HEAD
        + """
import threading
s, ctx, heard = c.c_void_p(), c.c_void_p(), []
cu("cuStreamCreate", c.byref(s), 1); cu("cuCtxGetCurrent", c.byref(ctx))
cu.kernel_us(1e7)
out = [plain("cuLaunchKernel", s), code("cuStreamQuery_ptsz", None), code("cuStreamQuery", None), code("cuStreamQuery", 2), code("cuStreamSynchronize_ptsz", None)]
b = u64(cu.alloc(4))
out.append(code("cuMemcpyHtoD_v2_ptds", b, b"four", size(4)))  # waits for its own stream alone
cu.kernel_us(1)
out += [plain("cuLaunchKernel_ptsz"), code("cuStreamQuery_ptsz", None)]
def other():
    cu("cuCtxSetCurrent", ctx)
    heard.append(code("cuStreamQuery_ptsz", None))
thread = threading.Thread(target=other); thread.start(); thread.join()
out += heard
""",
    )
    assert out == [0, 0, NOT_READY, 0, 0, 0, 0, NOT_READY, 0]
