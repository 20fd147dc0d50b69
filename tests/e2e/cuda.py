"""The common part of the tenants' programs in these tests."""

_HEAD = """
import ctypes as c, json, sys
u, context = c.CDLL("libcuda.so.1"), c.c_void_p()
def say(**words):
    sys.stdout.write(json.dumps(words) + "\\n")  # one write, because other processes may write to the pipe
    sys.stdout.flush()
def call(name, *words):
    code = getattr(u, name)(*words)
    if code: sys.exit(f"{name}: {code}")
def begin():
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", c.byref(context), 0)
    call("cuCtxSetCurrent", context)
"""


def cuda_program(body: str) -> str:
    """The text of a Python program that calls the driver by ctypes. In `body`, `call` calls a function of the
    driver and ends the program if that fails; `begin` makes the primary context of the first device current;
    `say` prints a line of JSON.
    """
    return _HEAD + body
